"""Finds the parts of a block of a diffusion transformer: its attention, norms, MLP and layers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional as F

from qgemm.fusion.branches import NotFused, merge
from qgemm.fusion.probe import find_norm
from qgemm.fusion.structure import places
from qgemm.kernels.norms import MODULATED, Norm
from qgemm.nn.blocks.attention import HeadNorms
from qgemm.nn.blocks.diffusion import BlockAttention
from qgemm.nn.blocks.merged import MergedWeights, why_apart
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.steps import NormStep

PACKAGE = "diffusers.models."
GELU = {"none": "gelu", "tanh": "gelu_tanh"}
"""The names of ``kernels.activations`` by ``approximate``."""


def find_attention(block: nn.Module, name: str, processor: str, width: int = 0) -> BlockAttention:
    """The attention ``name``, if ``processor`` computes it. ``width``: of its queries, or 0 to ask their layer."""
    module: Any = block.get_submodule(name)
    if type(module.processor).__name__ != processor:
        raise NotFused(f"its attention has a {type(module.processor).__name__}, not a {processor}")
    if getattr(module, "fused_projections", False):
        raise NotFused("its projections were merged: call unfuse_qkv_projections first")
    chooses = hasattr(module.processor, "_attention_backend")
    attend = sys.modules[f"{PACKAGE}attention_dispatch"].dispatch_attention_fn if chooses else None
    width = width or find_layer(block, f"{name}.to_q").out_features
    if width % module.heads:
        raise NotFused(f"its {width} columns of queries aren't {module.heads} whole heads")
    return BlockAttention(module, type(module.processor), attend, module.heads, width // module.heads)


def find_mlp(module: nn.Module) -> FusedMlp:
    """diffusers' ``FeedForward`` with GELU or GEGLU, or Flux 2's with SiLU and gates."""
    if type(module).__name__ == "Flux2FeedForward":
        check_is_swiglu(module.get_submodule("act_fn"))
        first, last = (merge_layers(module, name) for name in ("linear_in", "linear_out"))
        return FusedMlp(first, last, F.silu, "silu", gated=True)
    act: Any
    act, _, down, *_ = module.get_submodule("net").children()
    if type(act).__name__ == "GEGLU":
        return FusedMlp(merge([act.proj]), merge([down]), F.gelu, "gelu", gated=True, up_first=True)
    if type(act).__name__ != "GELU" or getattr(act, "approximate", None) not in GELU:
        raise NotFused(f"the activation of its MLP is a {type(act).__name__}, not a GELU")
    function = partial(F.gelu, approximate=act.approximate)
    return FusedMlp(merge([act.proj]), merge([down]), function, GELU[act.approximate], gated=False)


def check_is_swiglu(module: nn.Module) -> None:
    """Raises ``NotFused`` if ``module`` isn't Flux 2's ``silu(gate) * up``."""
    if type(module).__name__ != "Flux2SwiGLU" or type(module.get_submodule("gate_fn")) is not nn.SiLU:
        raise NotFused(f"the activation of its MLP is a {type(module).__name__}, not SiLU with gates")


def find_head_norms(block: nn.Module, names: tuple[str, str]) -> HeadNorms | None:
    """The norms of queries and keys; None if there are none."""
    query, key = (block.get_submodule(name.rpartition(".")[0])._modules.get(name.rpartition(".")[2]) for name in names)
    if query is None and key is None:
        return None
    norms = {None if each is None else find_norm(each) for each in (query, key)}
    norm = norms.pop()
    if norms or norm is None or norm.is_layer:
        raise NotFused("the norms of its queries and keys are unknown, or differ")
    return HeadNorms(query, key, norm, "heads")  # type: ignore[arg-type]


def find_modulated(block: nn.Module, name: str, kind: str = "LayerNorm") -> Norm:
    """A layer norm of the class ``kind``, whose weight and bias come from the time step."""
    norm = block.get_submodule(name)
    has_vectors = any(norm._parameters.get(each) is not None for each in ("weight", "bias"))
    if not isinstance(norm, nn.LayerNorm) or type(norm).__name__ != kind or has_vectors:
        raise NotFused(f"{name} is no layer norm without a weight and a bias")
    return Norm(MODULATED, norm.eps)


def find_step(block: nn.Module, name: str) -> NormStep:
    """A norm with a weight of its own."""
    module = block.get_submodule(name)
    norm = find_norm(module)
    if norm is None:
        raise NotFused(f"{name} is no known norm with a weight")
    return NormStep(module, norm)


def find_layer(block: nn.Module, name: str) -> Any:
    """A linear layer. Raises ``NotFused`` if it isn't quantized."""
    layer = block.get_submodule(name)
    if reason := why_apart([layer]):
        raise NotFused(reason)
    return layer


def merge_layers(block: nn.Module, *names: str) -> MergedWeights:
    """Linear layers as one product; raises as ``find_layer`` does."""
    return merge([find_layer(block, name) for name in names])


def fields_of(block: nn.Module, called: Collection[nn.Module] = ()) -> dict[str, Any]:
    """What every fused block has: ``defaults``, and which modules are ``called`` and ``passed_over``."""
    parameters = [*inspect.signature(type(block).forward).parameters.values()][1:]
    named = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    # None for those that must be given.
    defaults = {each.name: None if each.default is each.empty else each.default for each in named}
    not_called, are_called = places(block, called)
    return {"defaults": defaults, "passed_over": not_called, "called": are_called}
