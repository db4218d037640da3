"""Finds blocks of Flux, Qwen-Image and Stable Diffusion 3: ``nn/blocks/diffusion_joint.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from qgemm.fusion.branches import NotFused, merge
from qgemm.fusion.diffusion_parts import (
    GELU,
    fields_of,
    find_attention,
    find_head_norms,
    find_layer,
    find_mlp,
    find_modulated,
)
from qgemm.fusion.probe import normal, uniform
from qgemm.nn.blocks.diffusion import IMAGE, TEXT, TIME, Positions
from qgemm.nn.blocks.diffusion_joint import ANGLES, FusedJointBlock, FusedSingleBlock, Stream, StreamsBlock
from qgemm.nn.blocks.merged import why_apart
from qgemm.nn.blocks.mlp import FusedMlp

_BATCH, _TEXT_TOKENS, _IMAGE_TOKENS = 2, 5, 12


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


def find_flux(block: nn.Module) -> FusedJointBlock:
    """Flux's block of two streams."""
    return _find_joint(block, "FluxAttnProcessor", ((TEXT, _TEXT), (IMAGE, _IMAGE)), _real_positions, (TEXT,))


def find_qwen(block: nn.Module) -> FusedJointBlock:
    """Qwen-Image's block."""
    if getattr(block, "zero_cond_t", True):
        raise NotFused("it modulates some tokens of an image in another way than others")
    image = Names(("img_mod.0", "img_mod.1"), ("img_norm1", "img_norm2"), *_IMAGE_QKV, "img_mlp")
    text = Names(("txt_mod.0", "txt_mod.1"), ("txt_norm1", "txt_norm2"), *_TEXT_QKV, "txt_mlp")
    streams = (TEXT, text), (IMAGE, image)
    return _find_joint(block, "QwenDoubleStreamAttnProcessor2_0", streams, _complex_positions, (TEXT, IMAGE))


def find_sd3(block: nn.Module) -> FusedJointBlock:
    """Stable Diffusion 3's block."""
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
    attention = find_attention(block, "attn", processor)
    (first_name, first), (second_name, second) = ((name, _find_stream(block, names)) for name, names in streams)
    names, others = (first_name, second_name), fields_of(block, {*first.modulation, *second.modulation})
    return FusedJointBlock(attention, find_positions, first, second, names, limited, **others)


def find_single(block: nn.Module) -> FusedSingleBlock:
    """Flux's block of one stream."""
    attention = find_attention(block, "attn", "FluxAttnProcessor")
    shared = [find_layer(block, name) for name in (*_QKV, "proj_mlp")]
    if reason := why_apart(shared):
        raise NotFused(reason)
    act = block.get_submodule("act_mlp")
    if type(act) is not nn.GELU:
        raise NotFused(f"its activation is of class {type(act).__name__}, not GELU")
    out, qkv = merge([find_layer(block, "proj_out")]), merge(shared[:3])
    mlp = FusedMlp(merge(shared[3:]), out, act, GELU[act.approximate], gated=False)
    modulation = tuple(map(block.get_submodule, ("norm.silu", "norm.linear")))
    norms = find_head_norms(block, _IMAGE.head_norms)
    stream = Stream(modulation, (find_modulated(block, "norm.norm"),), qkv, norms, out, mlp)
    return FusedSingleBlock(attention, _real_positions, stream, **fields_of(block, {*modulation}))


def _find_stream(block: nn.Module, names: Names) -> Stream:
    modulation = tuple(map(block.get_submodule, names.modulation))
    if type(modulation[0]) is not nn.SiLU:
        raise NotFused(f"its modulation begins with a {type(modulation[0]).__name__}, not SiLU")
    before = tuple(find_modulated(block, name) for name in names.norms)
    mlp = find_mlp(block.get_submodule(names.mlp))
    qkv, out = merge([find_layer(block, name) for name in names.qkv]), merge([find_layer(block, names.out)])
    return Stream(modulation, before, qkv, find_head_norms(block, names.head_norms), out, mlp)


def joint_arguments(fused: StreamsBlock, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Random arguments for a block, for a call each."""
    generator = torch.Generator().manual_seed(0)
    K = fused.streams[0].qkv.layers[0].in_features
    sizes = {TEXT: (_BATCH, _TEXT_TOKENS, K), IMAGE: (_BATCH, _IMAGE_TOKENS, K), TIME: (_BATCH, K)}
    made: dict[str, Any] = {name: normal(size, generator).to(device, dtype) for name, size in sizes.items()}
    if ANGLES in fused.defaults:
        D, tokens = fused.attention.head_dim, _TEXT_TOKENS + _IMAGE_TOKENS
        angles = (uniform((tokens, D // 2), generator) * 6.28).to(device)
        if fused.find_positions is _complex_positions:
            turned = torch.polar(torch.ones_like(angles), angles)
            made[ANGLES] = turned[_TEXT_TOKENS:], turned[:_TEXT_TOKENS]
        else:
            angles = angles.repeat_interleave(2, dim=1)
            made[ANGLES] = angles.cos(), angles.sin()
    return [made]


def _real_positions(context: Mapping[str, Any], first: int) -> tuple[Positions, Positions]:
    """Flux's: cosines and sines ``[S, D]`` of all tokens, each value twice."""
    if context.get(ANGLES) is None:
        return None, None
    cos, sin = (each[None, :, ::2].float() for each in context[ANGLES])
    return (cos[:, :first], sin[:, :first]), (cos[:, first:], sin[:, first:])


def _complex_positions(context: Mapping[str, Any], first: int) -> tuple[Positions, Positions]:
    """Qwen-Image's: complex numbers ``[S, D / 2]`` of the image and of the text."""
    if context.get(ANGLES) is None:
        return None, None
    image, text = ((each.real[None], each.imag[None]) for each in context[ANGLES])
    return text, image


def _no_positions(context: Mapping[str, Any], first: int) -> tuple[Positions, Positions]:
    return None, None
