"""Finds blocks of Stable Diffusion 1.5, 2 and XL, and of PixArt: ``nn/blocks/diffusion_basic.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qgemm.fusion.branches import NotFused
from qgemm.fusion.diffusion_parts import fields_of, find_attention, find_mlp, find_modulated, find_step, merge_layers
from qgemm.fusion.probe import normal
from qgemm.nn.blocks.diffusion import IMAGE, TEXT, BlockAttention
from qgemm.nn.blocks.diffusion_basic import MASK, TIMESTEP, BasicBlock, FusedBasicBlock, FusedTimedBasicBlock
from qgemm.nn.blocks.diffusion_cross import Source

_BATCH, _TOKENS, _OTHERS = 2, 12, 5


def find_basic(block: Any) -> BasicBlock:
    """diffusers' ``BasicTransformerBlock``."""
    if block.norm_type not in ("layer_norm", "ada_norm_single"):
        raise NotFused(f"its norms are of type {block.norm_type}, not layer_norm or ada_norm_single")
    if block.pos_embed is not None:
        raise NotFused("it adds positions to its tokens")
    if block.only_cross_attention or block.attn2 is None or not block.attn2.is_cross_attention:
        raise NotFused("it doesn't attend to itself, then to a text")
    attention, cross = (_find_plain_attention(block, name) for name in ("attn1", "attn2"))
    mlp = find_mlp(block.ff)
    qkv = merge_layers(block, "attn1.to_q", "attn1.to_k", "attn1.to_v")
    key_value = merge_layers(block, "attn2.to_k", "attn2.to_v")
    out, query, cross_out = (merge_layers(block, name) for name in ("attn1.to_out.0", "attn2.to_q", "attn2.to_out.0"))
    parts = block, attention, qkv, out, cross, query, Source(key_value, None), cross_out, mlp
    others = {"returned": (IMAGE,), **fields_of(block)}
    if block.norm_type == "layer_norm":
        first, second, third = (find_step(block, name) for name in ("norm1", "norm2", "norm3"))
        return FusedBasicBlock(*parts, (first, second, third), **others)
    return FusedTimedBasicBlock(*parts, (find_modulated(block, "norm1"), find_modulated(block, "norm2")), **others)


def _find_plain_attention(block: nn.Module, name: str) -> BlockAttention:
    """Attention that only projects, attends and projects."""
    found = find_attention(block, name, "AttnProcessor2_0")
    module = found.module
    norms = ("group_norm", "spatial_norm", "norm_q", "norm_k", "norm_cross")
    if any(getattr(module, each) is not None for each in norms):
        raise NotFused(f"{name} normalizes more than the block does")
    if module.residual_connection or module.rescale_output_factor != 1:
        raise NotFused(f"{name} adds its input, or scales what it returns")
    return found


def basic_arguments(fused: BasicBlock, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Random arguments for a block, for a call with a mask and one without."""
    generator = torch.Generator().manual_seed(0)
    K, of_text = fused.qkv.layers[0].in_features, fused.source.key_value.layers[0].in_features
    sizes: dict[str, tuple[int, ...]] = {
        IMAGE: (_BATCH, _TOKENS, K), TEXT: (_BATCH, _OTHERS, of_text), TIMESTEP: (_BATCH, 6 * K),
        MASK: (_BATCH, 1, _OTHERS),
    }  # fmt: skip
    made: dict[str, Any] = {name: normal(size, generator).to(device, dtype) for name, size in sizes.items()}
    return [made, {**made, MASK: None}]
