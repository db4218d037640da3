"""Finds blocks of Wan: ``nn/blocks/diffusion_cross.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qgemm.fusion.branches import NotFused
from qgemm.fusion.diffusion_parts import (
    fields_of,
    find_attention,
    find_head_norms,
    find_mlp,
    find_modulated,
    find_step,
    merge_layers,
)
from qgemm.fusion.probe import normal, uniform
from qgemm.nn.blocks.diffusion import IMAGE, TEXT, TIME
from qgemm.nn.blocks.diffusion_cross import ANGLES, TEXT_TOKENS, FusedCrossBlock, Source

_PROCESSOR = "WanAttnProcessor"
_BATCH, _TOKENS, _OTHERS = 2, 12, 5


def find_wan(block: nn.Module) -> FusedCrossBlock:
    """Wan's block."""
    attention, cross = (find_attention(block, name, _PROCESSOR) for name in ("attn1", "attn2"))
    norms = find_head_norms(block, ("attn1.norm_q", "attn1.norm_k"))
    if norms is None:
        raise NotFused("its queries and keys have no norms")
    sources = [_find_source(block, "to_k", "to_v", "norm_k")]
    if block.get_submodule("attn2")._modules.get("add_k_proj") is not None:
        sources.append(_find_source(block, "add_k_proj", "add_v_proj", "norm_added_k"))
    qkv = merge_layers(block, "attn1.to_q", "attn1.to_k", "attn1.to_v")
    out, query, cross_out = (merge_layers(block, name) for name in ("attn1.to_out.0", "attn2.to_q", "attn2.to_out.0"))
    return FusedCrossBlock(
        block, find_modulated(block, "norm1", "FP32LayerNorm"), attention, qkv, norms, out, find_step(block, "norm2"),
        cross, query, find_step(block, "attn2.norm_q"), tuple(sources), cross_out,
        find_modulated(block, "norm3", "FP32LayerNorm"), find_mlp(block.get_submodule("ffn")), returned=(IMAGE,),
        **fields_of(block),
    )  # fmt: skip


def _find_source(block: nn.Module, key: str, value: str, norm: str) -> Source:
    return Source(merge_layers(block, f"attn2.{key}", f"attn2.{value}"), find_step(block, f"attn2.{norm}"))


def cross_arguments(fused: FusedCrossBlock, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Random arguments for a block: for a call with a time step for each sample, and one for each token."""
    generator = torch.Generator().manual_seed(0)
    K = fused.qkv.layers[0].in_features
    others = _OTHERS if len(fused.sources) == 1 else TEXT_TOKENS + _OTHERS
    x, text, time = (
        normal(size, generator).to(device, dtype)
        for size in ((_BATCH, _TOKENS, K), (_BATCH, others, K), (_BATCH, _TOKENS, 6, K))
    )
    angles = (uniform((1, _TOKENS, 1, fused.attention.head_dim // 2), generator) * 6.28).repeat_interleave(2, dim=-1)
    given = {IMAGE: x, TEXT: text, ANGLES: (angles.cos().to(device), angles.sin().to(device))}
    return [{**given, TIME: time[:, 0]}, {**given, TIME: time}]
