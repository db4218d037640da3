"""Rotation of the residual stream: everything that writes to it or reads from it is rotated beforehand.

Ashkboos et al. 2024, "QuaRot", arXiv 2404.00456, after Ashkboos et al. 2024, "SliceGPT", arXiv 2401.15024. With an
orthonormal ``R`` and a norm without gain, ``norm(x) = x / rms(x)``, ``norm(x R) = norm(x) R``. So gains move into the
weights after their norms, ``W <- W * g``; embeddings become ``E R``; weights that read become ``W R``, those that write
``R^T W``, with biases ``b R``. The model computes the same, with rotated hidden states, at no cost at run time; outlier
channels of the residual stream disappear, because they are spread over all channels. ``R = diag(d) H``, with ``H`` the
block-diagonal Walsh-Hadamard matrix of ``qgemm.numerics.hadamard`` and signs ``d``.

It requires a language model with such norms before every reader, such as Llama, Mistral and Qwen, and an output head
that isn't tied; experts are supported if their layout is known. The result is verified by the logits of some tokens,
for which the whole model must run; otherwise the model stays unchanged, and a note says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qgemm.calibration.folding import as_they_were, idle_modules, input_weights, norm_consumers
from qgemm.calibration.method import Block, Call, LayerWork, Method
from qgemm.nn.float_experts import known_experts
from qgemm.numerics.hadamard import hadamard

# Ends of names of linear layers whose output is added to the residual stream.
_WRITERS = ("o_proj", "out_proj", "down_proj", "w2")
_TOKENS = (2, 32)
# Relative change of the logits, for half of the tokens: with experts, rounding alone sends a few tokens to other ones.
# Measured on the models of the tests: 1e-6 in float32 and 0.02 in bfloat16; 0.4 and more where a kind of weight was
# missed.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass(frozen=True)
class ResidualRotation(Method):
    """Rotates the residual stream of a language model, before any block is quantized.

    ``seed``: for the random signs. Ashkboos et al. 2024, "QuaRot", arXiv 2404.00456.
    """

    name: ClassVar[str] = "residual-rotation"
    needs_data: ClassVar[bool] = False
    seed: int = 0

    def prepare(self, model: nn.Module, layers: dict[str, LayerWork]) -> None:
        """Changes weights in place, or adds the reason why it can't to every layer's notes."""
        reason = rotate_residual(model, self.seed)
        if reason:
            for work in layers.values():
                work.notes.append(f"residual-rotation: not rotated: {reason}")

    def apply(self, block: Block) -> None:
        """Does nothing: ``prepare`` did everything."""


@torch.no_grad()
def rotate_residual(model: Any, seed: int = 0) -> str:
    """Rotates ``model``, in place; returns an empty text, or why it couldn't, with the model unchanged."""
    embedding, head = (_ask(model, name) for name in ("get_input_embeddings", "get_output_embeddings"))
    names = {module: name for name, module in model.named_modules()}
    if reason := _why_unfit(embedding, head, names):
        return reason
    K = embedding.weight.shape[1]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(embedding.num_embeddings, _TOKENS, generator=generator, device="cpu")
    signs = torch.randint(2, (K,), generator=generator, device="cpu") * 2.0 - 1

    call = Call((), {"input_ids": ids.to(embedding.weight.device), "use_cache": False})
    block = Block("", model, model, {}, [call])
    try:
        idle = idle_modules(block)
    except Exception as error:  # third-party code, which may raise anything
        return f"it doesn't run on tokens alone ({type(error).__name__})"
    if idle:
        return f"{idle[0]!r} has no part in what it makes of tokens alone"
    readers = {
        model.get_submodule(norm): [model.get_submodule(name) for name in consumers]
        for norm, consumers in norm_consumers(block).items()
        if model.get_submodule(norm).weight.shape == (K,)
    }
    for norm in readers:
        if isinstance(norm, nn.LayerNorm) or getattr(norm, "bias", None) is not None:
            return f"{names[norm]!r} is a LayerNorm, whose mean a rotation doesn't keep"
    written = {
        module: tensors
        for name, module in model.named_modules()
        if (tensors := _written(name, module)) and tensors[0].shape[-1] == K
    }
    expected = block.outputs()[0].float()
    with as_they_were([embedding, *readers, *chain.from_iterable(readers.values()), *written]) as keep:
        for norm, layers in readers.items():
            _fold_and_rotate(norm, layers, signs)
        for tensor in (embedding.weight, *chain.from_iterable(written.values())):
            _rotate(tensor, signs)
        difference = block.outputs()[0].float() - expected
        change = float((difference.norm(dim=-1) / expected.norm(dim=-1)).median())
        if change <= _TOLERANCES[embedding.weight.dtype]:
            keep()
            return ""
    return f"its logits would change by {change:.2g} of their size: not all that reads or writes is known"


def _why_unfit(embedding: Any, head: Any, names: Mapping[nn.Module, str]) -> str:
    """Why a model with this embedding and head can't be rotated; empty if nothing is known against it yet."""
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        return "it isn't a language model with embeddings and a head"
    if head.weight is embedding.weight:
        return f"{names[head]!r} is tied to {names[embedding]!r}"
    if embedding.weight.device.type == "meta" or embedding.weight.dtype not in _TOLERANCES:
        return f"its embeddings are {embedding.weight.dtype} on {embedding.weight.device}"
    return ""


def _fold_and_rotate(norm: Any, layers: Sequence[nn.Module], signs: Tensor) -> None:
    """Moves the gain of ``norm`` into the weights of ``layers``, which read its output, and rotates these weights."""
    gain = norm.weight.float()
    for weight in {layer: weight for layer in layers for weight in input_weights(layer)}.values():
        _rotate(weight, signs, gain)
    norm.weight.fill_(1)


def _rotate(x: Tensor, signs: Tensor, gain: Tensor | None = None) -> None:
    """``x <- (x * gain) @ R`` for ``[..., K]``, in place; experts are processed one at a time."""
    for part in x if x.ndim == 3 else [x]:
        values = part.float() * signs.to(x.device)
        part.copy_(hadamard(values if gain is None else values * gain))


def _written(name: str, module: nn.Module) -> list[Tensor]:
    """Views ``[..., N]`` of weights and biases whose result ``module``, by its name, may add to the residual stream."""
    if isinstance(module, nn.Linear):
        own: list[Tensor | None] = [module.weight.detach().t(), module.bias] if name.endswith(_WRITERS) else []
        return [tensor.detach() for tensor in own if tensor is not None]
    experts = known_experts(module)
    if experts is None:
        return []
    weight = module.get_parameter(experts.parameters["down_proj"]).detach()
    weights = [weight if experts.is_transposed else weight.transpose(1, 2)]
    if experts.has_bias:
        weights.append(module.get_parameter(experts.parameters["down_proj_bias"]).detach())
    return weights


def _ask(model: Any, name: str) -> Any:
    get = getattr(model, name, None)
    try:
        return get() if callable(get) else None
    except NotImplementedError:
        return None
