"""Blocks of diffusion transformers: attention and MLPs whose norms, residuals and rotation are fused with products.

The time step decides what a norm does to a sample: ``norm(x) * (1 + scale) + shift``; and how much of a branch is
added: ``x + gate * branch``. A ``FusedJointBlock`` (Flux, Qwen-Image, Stable Diffusion 3) has two streams, the tokens
of a text and of an image, with layers of their own and one attention over all tokens. A ``FusedSingleBlock`` (Flux)
has one stream, and one product behind attention and MLP, which are computed side by side.

As in ``layer.py``, another ``forward`` of the instance computes this, or calls the class's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qgemm.kernels.norms import MODULATED, Norm
from qgemm.kernels.rotary.call import RotaryCall
from qgemm.kernels.rows import QuantizedRows
from qgemm.nn.blocks.attention import HeadNorms
from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.fused_module import FusedModule
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.operands import Input, Operands, read_rows
from qgemm.ops.norms import add_norm, add_norm_quantize, norm_quantize
from qgemm.ops.rows import activation_quantize

MAX_FLOAT16 = 65504.0
"""Flux and Qwen-Image limit what float16 blocks return to this."""

IMAGE, TEXT, TIME = "hidden_states", "encoder_hidden_states", "temb"
"""The blocks' names for their tokens, and for the time step's embedding."""

Positions: TypeAlias = tuple[Tensor, Tensor] | None
"""Cosines and sines of a stream's tokens, ``[1, S, D / 2]`` in float32."""


@dataclass(frozen=True, eq=False)
class JointAttention:
    """Attention over the tokens of all streams.

    - ``module``: the module, whose ``processor`` is of the class ``processor``.
    - ``attend``: diffusers' function that chooses a backend; None if the processor calls PyTorch's attention.
    - ``heads``: their number; ``head_dim``: values in each.
    """

    module: Any
    processor: type
    attend: Callable[..., Tensor] | None
    heads: int
    head_dim: int

    def is_as_it_was(self) -> bool:
        """Whether the module computes attention in the known way, in one process."""
        processor: Any = self.module.processor
        return type(processor) is self.processor and getattr(processor, "_parallel_config", None) is None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """``[B, S, H * D]`` of queries ``[B, S, H, D]``, keys and values ``[B, H, S, D]``."""
        if self.attend is None:
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)
        else:
            backend = self.module.processor._attention_backend
            out = self.attend(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, backend=backend)
        return out.flatten(2, 3).to(q.dtype)

    def call(self, qkv: Tensor, norms: HeadNorms | None, positions: Positions) -> RotaryCall:
        """The arguments of the operators that normalize and rotate heads of ``qkv``."""
        cos, sin = (None, None) if positions is None else positions
        weights, norm = (None, None) if norms is None else norms.weights(qkv), None if norms is None else norms.norm
        assert weights is not None  # or the block wouldn't be computed here
        kind, eps = ("rms", 0.0) if norm is None else (norm.kind, norm.eps)
        return RotaryCall(qkv, cos, sin, weights[0], weights[1], kind, eps, self.heads, self.heads, interleaved=True)


class Modulation(NamedTuple):
    """What the time step decides for a branch, ``[B, K]`` each: ``1 + scale``, shift and gate; ``eps``: of its norm."""

    weight: Tensor
    shift: Tensor
    gate: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class Stream:
    """The layers for the tokens of a text, or of an image, or for both.

    - ``modulation``: modules that are called one after another on the time step's embedding ``[B, T]``.
    - ``eps``: of the norm before each branch.
    - ``qkv``: projections of queries, keys and values; ``norms``: of queries and keys; ``out``: the projection behind
      attention.
    """

    modulation: tuple[nn.Module, ...]
    eps: tuple[float, ...]
    qkv: MergedWeights
    norms: HeadNorms | None
    out: MergedWeights
    mlp: FusedMlp

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of its products."""
        return (self.qkv, self.out, *self.mlp.products)

    def modulations(self, time: Tensor) -> list[Modulation]:
        """That of each branch in turn."""
        for module in self.modulation:
            time = module(time)
        found = time.unflatten(-1, (3 * len(self.eps), -1)).transpose(0, 1).contiguous()
        weights = 1 + found[1::3]
        return [Modulation(*each) for each in zip(weights, found[::3], found[2::3], self.eps, strict=True)]


@dataclass(frozen=True, eq=False)
class FusedJointBlock(FusedModule):
    """How a block of two streams computes.

    - ``first``, ``second``: the streams, in the order of their tokens in attention; ``names``: their arguments' names.
    - ``find_positions``: ``(context, tokens of the first stream) -> positions of both``.
    - ``limited``: the streams that are limited in float16, by the names of their arguments.
    - ``defaults``: the arguments of ``forward``, in order.
    """

    attention: JointAttention
    first: Stream
    second: Stream
    names: tuple[str, str]
    find_positions: Callable[[Mapping[str, Any], int], tuple[Positions, Positions]]
    limited: tuple[str, ...]
    defaults: Mapping[str, Any]

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Both streams."""
        return (self.first, self.second)

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of all products."""
        return (*self.first.products, *self.second.products)

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` of a fused block."""
        return forward

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The tokens of the text and of the image, as the block returns them."""
        tokens = [context[name] for name in self.names]
        own, before = (operands[:4], operands[4:]), tokens[0].shape[1]
        positions = self.find_positions(context, before)
        modulations = [stream.modulations(context[TIME]) for stream in self.streams]
        shape = len(tokens[0]), self.attention.heads, before + tokens[1].shape[1], self.attention.head_dim
        k, v = (tokens[0].new_empty(shape) for _ in range(2))
        queries, end = [], 0
        for i, x in enumerate(tokens):
            qkv = own[i][0].product(modulated(x, modulations[i][0], own[i]), x.dtype)
            end += x.shape[1]
            length = torch.full((1,), end, dtype=torch.int32, device=x.device)
            call = self.attention.call(qkv, self.streams[i].norms, positions[i])
            queries.append(torch.ops.qgemm.rotate_and_store(*call, k, v, None, None, length))
        attended = self.attention(torch.cat(queries, dim=1), k, v, self._mask(context, end - before))
        parts = attended[:, :before], attended[:, before:]
        done = [_add_branches(x, parts[i], self.streams[i].mlp, own[i], modulations[i]) for i, x in enumerate(tokens)]
        outputs = dict(zip(self.names, done, strict=True))
        for name in self.limited:
            outputs[name] = limited(outputs[name])
        return outputs[TEXT], outputs[IMAGE]

    def _mask(self, context: Mapping[str, Any], others: int) -> Tensor | None:
        """Which keys count, ``[B, 1, 1, S]``; ``others``: tokens without a mask, behind those that have one."""
        mask = context.get(f"{TEXT}_mask")
        if mask is None:
            return None
        return torch.cat([mask, mask.new_ones((mask.shape[0], others), dtype=torch.bool)], dim=1)[:, None, None]


def _add_branches(
    x: Tensor, attended: Tensor, mlp: FusedMlp, operands: tuple[Operands, ...], modulations: list[Modulation]
) -> Tensor:
    """``x`` with what attention and the MLP add."""
    out_of, of_mlp, (attention, after) = operands[1], operands[2:], modulations
    x, into = gated_and_modulated(out_of.product(attended, x.dtype), x, attention.gate, after, of_mlp)
    return gated(mlp(into, of_mlp, None, x.dtype, {}), x, after.gate)


@dataclass(frozen=True, eq=False)
class FusedSingleBlock(FusedModule):
    """How a block of one stream computes, whose attention and MLP share a norm and the product behind them.

    ``stream.mlp.down`` is the product behind both, ``stream.out`` the same.
    """

    attention: JointAttention
    stream: Stream
    find_positions: Callable[[Mapping[str, Any], int], tuple[Positions, Positions]]
    defaults: Mapping[str, Any]

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The stream."""
        return (self.stream,)

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of all products."""
        return (self.stream.qkv, *self.stream.mlp.products)

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` of a fused block."""
        return forward

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The tokens of the text and of the image, as the block returns them."""
        of_qkv, of_mlp, out_of = operands
        text = context[TEXT].shape[1]
        x = torch.cat([context[TEXT], context[IMAGE]], dim=1)
        positions, _ = self.find_positions(context, x.shape[1])
        (modulation,) = self.stream.modulations(context[TIME])
        into = modulated(x, modulation, (of_qkv,))
        qkv = of_qkv.product(into, x.dtype)
        q, k, v = torch.ops.qgemm.rotate(*self.attention.call(qkv, self.stream.norms, positions))
        del qkv
        attended = self.attention(q, k, v, None)
        del q, k, v
        h = of_mlp.product(into, x.dtype)
        if out_of.reads_rows:
            how = self.stream.mlp.activation_name, False, out_of.input_scale, out_of.dtype
            both: Input = QuantizedRows(*activation_quantize(h, *how, attended))
        else:
            both = torch.cat([attended, self.stream.mlp.activation(h)], dim=2)
        x = limited(gated(out_of.product(both, x.dtype), x, modulation.gate))
        return x[:, :text], x[:, text:]


def modulated(x: Tensor, modulation: Modulation, operands: tuple[Operands, ...]) -> Input:
    """``norm(x) * (1 + scale) + shift`` as input for ``operands``."""
    vectors, norm = modulation[:2], Norm(MODULATED, modulation.eps)
    if not read_rows(operands):
        return add_norm(x, None, None, *vectors, norm)[1]
    return QuantizedRows(*norm_quantize(x, *vectors, norm, operands[0].input_scale, operands[0].dtype))


def gated(branch: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """``x + gate * branch``."""
    return add_norm(branch, x, None, None, None, Norm(MODULATED), gate)[0]


def gated_and_modulated(
    branch: Tensor, x: Tensor, gate: Tensor, modulation: Modulation, operands: tuple[Operands, ...]
) -> tuple[Tensor, Input]:
    """``total = x + gate * branch``, and ``modulated(total)``."""
    vectors, norm = modulation[:2], Norm(MODULATED, modulation.eps)
    if not read_rows(operands):
        return add_norm(branch, x, None, *vectors, norm, gate)
    reads = operands[0].input_scale, operands[0].dtype
    total, *rows = add_norm_quantize(branch, x, None, *vectors, norm, *reads, gate)
    return total, QuantizedRows(*rows)


def limited(x: Tensor) -> Tensor:
    """``x``, limited if it is float16."""
    return x.clip(-MAX_FLOAT16, MAX_FLOAT16) if x.dtype == torch.float16 else x


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of a fused block, with the arguments of the class's own."""
    fused: FusedJointBlock | FusedSingleBlock | None = fused_of(self)
    if fused is not None:
        context = {**fused.defaults, **dict(zip(fused.defaults, args, strict=False)), **kwargs}
        operands = _operands(self, fused, context)
        if operands is not None:
            return fused(operands, context)
    return type(self).forward(self, *args, **kwargs)


def _operands(
    block: nn.Module, fused: FusedJointBlock | FusedSingleBlock, context: Mapping[str, Any]
) -> tuple[Operands, ...] | None:
    """The operands of all products for a call of ``block``; None if it can't be computed here."""
    given = {IMAGE, TEXT, TIME}
    if context.keys() != fused.defaults.keys() or not all(type(context[name]) is Tensor for name in given):
        return None
    known = given | {"image_rotary_emb", f"{TEXT}_mask"}
    # What adapters of images and others pass.
    if any(value is not None and not _is_empty(value) for name, value in context.items() if name not in known):
        return None
    image, text, time = (context[name] for name in (IMAGE, TEXT, TIME))
    if not (image.dtype == text.dtype == time.dtype) or len(image) != len(text) or len(image) != len(time):
        return None
    if not fused.is_plain_call(block, image, context) or not fused.attention.is_as_it_was():
        return None
    if not fused.has_its_modules() or not all(
        each.norms is None or each.norms.weights(image) for each in fused.streams
    ):
        return None
    operands = tuple([product.operands() for product in fused.products])
    return None if None in operands else operands  # type: ignore[return-value]


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value
