"""Finds blocks of diffusers' diffusion transformers that can be fused, by their class, and verifies each.

A block is verified on random tokens: diffusers' models have no inputs of their own to be called with.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from qgemm.fusion.branches import NotFused, merge
from qgemm.fusion.probe import find_norm, normal, uniform
from qgemm.fusion.report import FusionRecord
from qgemm.fusion.structure import places
from qgemm.fusion.verify import MAX_ERROR, random_values, relative_error
from qgemm.nn.blocks.attention import HeadNorms
from qgemm.nn.blocks.binding import bind
from qgemm.nn.blocks.diffusion import (
    IMAGE,
    TEXT,
    TIME,
    FusedJointBlock,
    FusedSingleBlock,
    JointAttention,
    Positions,
    Stream,
)
from qgemm.nn.blocks.merged import MergedWeights, why_apart
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.linear_layer import LinearLayer

Block: TypeAlias = FusedJointBlock | FusedSingleBlock

_PACKAGE = "diffusers.models."
_ANGLES = "image_rotary_emb"
_BATCH, _TEXT_TOKENS, _IMAGE_TOKENS = 2, 5, 12
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


class Names(NamedTuple):
    """The dotted names of a stream's modules.

    ``modulation``: the modules called on the time step's embedding; ``norms``: the norms before the branches.
    """

    modulation: tuple[str, ...]
    norms: tuple[str, ...]
    qkv: tuple[str, ...]
    head_norms: tuple[str, str]
    out: str
    mlp: str


_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_IMAGE_QKV = (_QKV, ("attn.norm_q", "attn.norm_k"), "attn.to_out.0")
_TEXT_QKV = (
    ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    ("attn.norm_added_q", "attn.norm_added_k"),
    "attn.to_add_out",
)
_IMAGE = Names(("norm1.silu", "norm1.linear"), ("norm1.norm", "norm2"), *_IMAGE_QKV, "ff")
_TEXT = Names(
    ("norm1_context.silu", "norm1_context.linear"), ("norm1_context.norm", "norm2_context"), *_TEXT_QKV, "ff_context"
)


def is_block(module: nn.Module) -> bool:
    """Whether ``module`` is a block that may be fused."""
    return type(module).__name__ in _FOUND_BY and type(module).__module__.startswith(_PACKAGE)


def fuse_block(name: str, block: nn.Module) -> FusionRecord:
    """Fuses ``block``, if that is possible, and it then computes the same."""
    kind = type(block).__name__
    if "forward" in vars(block):
        return FusionRecord(name, kind, (), "its forward was replaced, as accelerate's hooks do", None)
    if any(parameter.is_meta for parameter in block.parameters()):
        return FusionRecord(
            name, kind, (), "it can't be verified before the model has values: fuse it again then", None
        )
    try:
        fused = _FOUND_BY[kind](block)
    except NotFused as obstacle:
        for layer in block.modules():
            if isinstance(layer, LinearLayer) and isinstance(layer.merged, MergedWeights):
                layer.merged.separate()  # it was merged before the obstacle was met
        return FusionRecord(name, kind, (), str(obstacle), None)
    with random_values(block):
        error, reason = _error_of(fused, block)
    if error > MAX_ERROR:
        fused.separate()
        off = f" (off by {error:.0%})" if error < float("inf") else ""
        return FusionRecord(name, kind, (), reason or f"it computes something else than its class says{off}", error)
    bind(block, fused)
    return FusionRecord(name, kind, ("attention", "mlp"), "", error)


@torch.no_grad()
def _error_of(fused: Block, block: nn.Module) -> tuple[float, str]:
    """The larger of the differences of both outputs, and why there is none."""
    dtype, device = _float_like(block), fused.products[0].layers[0].weight.device
    context = {**fused.defaults, **_tokens(fused, dtype, device)}
    operands = tuple([product.operands() for product in fused.products])
    if None in operands:
        return float("inf"), "its layers can't be computed together now"
    try:
        expected = type(block).forward(block, **context)
        found = fused(operands, context)  # type: ignore[arg-type]
    except Exception as raised:  # a block may raise anything
        return float("inf"), f"it can't be verified: it can't be called ({type(raised).__name__}: {raised})"
    if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in expected]:
        return float("inf"), ""
    given = (context[TEXT], context[IMAGE])
    return max(relative_error(*three) for three in zip(found, expected, given, strict=True)), ""


def _float_like(block: nn.Module) -> torch.dtype:
    """The dtype of the block's floats: of its biases and norms."""
    found = {p.dtype for name, p in block.named_parameters() if name.endswith(("bias", "weight")) and p.dim() == 1}
    return found.pop() if len(found) == 1 else torch.get_default_dtype()


def _tokens(fused: Block, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Random arguments for a block."""
    generator = torch.Generator().manual_seed(0)
    K = fused.streams[0].qkv.layers[0].in_features
    sizes = {TEXT: (_BATCH, _TEXT_TOKENS, K), IMAGE: (_BATCH, _IMAGE_TOKENS, K), TIME: (_BATCH, K)}
    made: dict[str, Any] = {name: normal(size, generator).to(device, dtype) for name, size in sizes.items()}
    if _ANGLES in fused.defaults:
        D, tokens = fused.attention.head_dim, _TEXT_TOKENS + _IMAGE_TOKENS
        angles = (uniform((tokens, D // 2), generator) * 6.28).to(device)
        if fused.find_positions is _complex_positions:
            turned = torch.polar(torch.ones_like(angles), angles)
            made[_ANGLES] = turned[_TEXT_TOKENS:], turned[:_TEXT_TOKENS]
        else:
            angles = angles.repeat_interleave(2, dim=1)
            made[_ANGLES] = angles.cos(), angles.sin()
    return made


def _real_positions(context: Mapping[str, Any], first: int) -> tuple[Positions, Positions]:
    """Flux's: cosines and sines ``[S, D]`` of all tokens, each value twice."""
    if context.get(_ANGLES) is None:
        return None, None
    cos, sin = (each[None, :, ::2].float() for each in context[_ANGLES])
    return (cos[:, :first], sin[:, :first]), (cos[:, first:], sin[:, first:])


def _complex_positions(context: Mapping[str, Any], first: int) -> tuple[Positions, Positions]:
    """Qwen-Image's: complex numbers ``[S, D / 2]`` of the image and of the text."""
    if context.get(_ANGLES) is None:
        return None, None
    image, text = ((each.real[None], each.imag[None]) for each in context[_ANGLES])
    return text, image


def _no_positions(context: Mapping[str, Any], first: int) -> tuple[Positions, Positions]:
    return None, None


def _find_flux(block: nn.Module) -> FusedJointBlock:
    return _find_joint(block, "FluxAttnProcessor", ((TEXT, _TEXT), (IMAGE, _IMAGE)), _real_positions, (TEXT,))


def _find_qwen(block: nn.Module) -> FusedJointBlock:
    if getattr(block, "zero_cond_t", True):
        raise NotFused("it modulates some tokens of an image in another way than others")
    image = Names(("img_mod.0", "img_mod.1"), ("img_norm1", "img_norm2"), *_IMAGE_QKV, "img_mlp")
    text = Names(("txt_mod.0", "txt_mod.1"), ("txt_norm1", "txt_norm2"), *_TEXT_QKV, "txt_mlp")
    streams = (TEXT, text), (IMAGE, image)
    return _find_joint(block, "QwenDoubleStreamAttnProcessor2_0", streams, _complex_positions, (TEXT, IMAGE))


def _find_sd3(block: nn.Module) -> FusedJointBlock:
    if getattr(block, "use_dual_attention", True) or getattr(block, "context_pre_only", True):
        raise NotFused("it has two attentions, or returns no text")
    if block._chunk_size is not None:
        raise NotFused("its MLPs are computed in chunks")
    return _find_joint(block, "JointAttnProcessor2_0", ((IMAGE, _IMAGE), (TEXT, _TEXT)), _no_positions, ())


def _find_joint(
    block: nn.Module,
    processor: str,
    streams: tuple[tuple[str, Names], tuple[str, Names]],
    find_positions: Callable[[Mapping[str, Any], int], tuple[Positions, Positions]],
    limited: tuple[str, ...],
) -> FusedJointBlock:
    """A block of two ``streams``: the names of their tokens, and of their modules."""
    attention = _find_attention(block, processor)
    (first_name, first), (second_name, second) = ((name, _find_stream(block, names)) for name, names in streams)
    passed_over, called = places(block, {*first.modulation, *second.modulation})
    return FusedJointBlock(
        attention, first, second, (first_name, second_name), find_positions, limited, _defaults(block),
        passed_over=passed_over, called=called,
    )  # fmt: skip


def _find_single(block: nn.Module) -> FusedSingleBlock:
    attention = _find_attention(block, "FluxAttnProcessor")
    shared = [_layer(block, name) for name in (*_QKV, "proj_mlp")]
    if reason := why_apart(shared):
        raise NotFused(reason)
    act = block.get_submodule("act_mlp")
    if type(act) is not nn.GELU:
        raise NotFused(f"its activation is of class {type(act).__name__}, not GELU")
    out, qkv = merge([_layer(block, "proj_out")]), merge(shared[:3])
    mlp = FusedMlp(merge(shared[3:]), out, act, _GELU[act.approximate], gated=False)
    modulation = tuple(map(block.get_submodule, ("norm.silu", "norm.linear")))
    stream = Stream(modulation, (_eps(block, "norm.norm"),), qkv, _head_norms(block, _IMAGE.head_norms), out, mlp)
    passed_over, called = places(block, {*modulation})
    defaults = _defaults(block)
    return FusedSingleBlock(attention, stream, _real_positions, defaults, passed_over=passed_over, called=called)


def _find_attention(block: nn.Module, processor: str) -> JointAttention:
    module: Any = block.get_submodule("attn")
    if type(module.processor).__name__ != processor:
        raise NotFused(f"its attention has a {type(module.processor).__name__}, not a {processor}")
    if getattr(module, "fused_projections", False):
        raise NotFused("its projections were merged: call unfuse_qkv_projections first")
    chooses = hasattr(module.processor, "_attention_backend")
    attend = sys.modules[f"{_PACKAGE}attention_dispatch"].dispatch_attention_fn if chooses else None
    width = _layer(block, _QKV[0]).out_features
    if width % module.heads:
        raise NotFused(f"its {width} columns of queries aren't {module.heads} whole heads")
    return JointAttention(module, type(module.processor), attend, module.heads, width // module.heads)


def _find_stream(block: nn.Module, names: Names) -> Stream:
    modulation = tuple(map(block.get_submodule, names.modulation))
    if type(modulation[0]) is not nn.SiLU:
        raise NotFused(f"its modulation begins with a {type(modulation[0]).__name__}, not SiLU")
    eps = tuple(_eps(block, name) for name in names.norms)
    mlp = _find_mlp(block.get_submodule(names.mlp))
    qkv, out = merge([_layer(block, name) for name in names.qkv]), merge([_layer(block, names.out)])
    return Stream(modulation, eps, qkv, _head_norms(block, names.head_norms), out, mlp)


def _find_mlp(module: nn.Module) -> FusedMlp:
    """diffusers' ``FeedForward`` with GELU."""
    act: Any
    act, _, down, *_ = module.get_submodule("net").children()
    if type(act).__name__ != "GELU" or getattr(act, "approximate", None) not in _GELU:
        raise NotFused(f"the activation of its MLP is a {type(act).__name__}, not a GELU")
    function = partial(F.gelu, approximate=act.approximate)
    return FusedMlp(merge([act.proj]), merge([down]), function, _GELU[act.approximate], gated=False)


def _head_norms(block: nn.Module, names: tuple[str, str]) -> HeadNorms | None:
    query, key = (block.get_submodule(name.rpartition(".")[0])._modules.get(name.rpartition(".")[2]) for name in names)
    if query is None and key is None:
        return None
    norms = {None if each is None else find_norm(each) for each in (query, key)}
    norm = norms.pop()
    if norms or norm is None or norm.is_layer:
        raise NotFused("the norms of its queries and keys are unknown, or differ")
    return HeadNorms(query, key, norm, "heads")  # type: ignore[arg-type]


def _eps(block: nn.Module, name: str) -> float:
    """The epsilon of a layer norm without weight and bias."""
    norm = block.get_submodule(name)
    if type(norm) is not nn.LayerNorm or norm._parameters.get("weight") is not None or norm.bias is not None:
        raise NotFused(f"{name} is no layer norm without a weight and a bias")
    return norm.eps


def _layer(block: nn.Module, name: str) -> Any:
    """A linear layer. Raises ``NotFused`` if it isn't quantized."""
    layer = block.get_submodule(name)
    if reason := why_apart([layer]):
        raise NotFused(reason)
    return layer


def _defaults(block: nn.Module) -> dict[str, Any]:
    """The arguments of the block's ``forward``, in order; None for those that must be given."""
    parameters = [*inspect.signature(type(block).forward).parameters.values()][1:]
    named = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    return {each.name: None if each.default is each.empty else each.default for each in named}


_FOUND_BY: dict[str, Callable[[nn.Module], Block]] = {
    "FluxTransformerBlock": _find_flux,
    "FluxSingleTransformerBlock": _find_single,
    "QwenImageTransformerBlock": _find_qwen,
    "JointTransformerBlock": _find_sd3,
}
