"""Fuses blocks of diffusers' diffusion transformers, found by their class, and verifies each.

A block is verified on random tokens: diffusers' models have no inputs of their own to be called with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from qgemm.fusion.branches import NotFused
from qgemm.fusion.diffusion_basic import basic_arguments, find_basic
from qgemm.fusion.diffusion_cross import cross_arguments, find_wan
from qgemm.fusion.diffusion_joint import (
    find_flux,
    find_flux2,
    find_flux2_parallel,
    find_flux_single,
    find_hunyuan_video,
    find_hunyuan_video_single,
    find_qwen,
    find_sd3,
    joint_arguments,
    parallel_arguments,
)
from qgemm.fusion.diffusion_parts import PACKAGE
from qgemm.fusion.report import FusionRecord
from qgemm.fusion.verify import MAX_ERROR, random_values, relative_error
from qgemm.nn.blocks.binding import bind
from qgemm.nn.blocks.diffusion import DiffusionBlock
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.linear_layer import LinearLayer


class Family(NamedTuple):
    """How blocks of a class are found, and which random arguments they are verified with."""

    find: Callable[[nn.Module], DiffusionBlock]
    arguments: Callable[[Any, torch.dtype, torch.device], list[dict[str, Any]]]


def is_block(module: nn.Module) -> bool:
    """Whether ``module`` is a block that may be fused."""
    return type(module).__name__ in _FAMILIES and type(module).__module__.startswith(PACKAGE)


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
        fused = _FAMILIES[kind].find(block)
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
def _error_of(fused: DiffusionBlock, block: nn.Module) -> tuple[float, str]:
    """The largest difference of any output, and why there is none."""
    dtype, device = _float_like(block), fused.products[0].layers[0].weight.device
    error = 0.0
    for arguments in _FAMILIES[type(block).__name__].arguments(fused, dtype, device):
        context = {**fused.defaults, **arguments}
        operands = tuple([product.operands() for product in fused.products])
        if None in operands:
            return float("inf"), "its layers can't be computed together now"
        try:
            expected = type(block).forward(block, **context)
            found = fused(operands, context)  # type: ignore[arg-type]
        except Exception as raised:  # a block may raise anything
            return float("inf"), f"it can't be verified: it can't be called ({type(raised).__name__}: {raised})"
        given = [context[name] for name in fused.returned]
        expected, found = ((each,) if isinstance(each, torch.Tensor) else each for each in (expected, found))
        if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in expected]:
            return float("inf"), ""
        error = max(error, *(relative_error(*three) for three in zip(found, expected, given, strict=True)))
    return error, ""


def _float_like(block: nn.Module) -> torch.dtype:
    """The dtype of most of the block's floats: of its biases and norms."""
    found = Counter(
        p.dtype for name, p in block.named_parameters() if name.endswith(("bias", "weight")) and p.dim() == 1
    )
    return found.most_common(1)[0][0] if found else torch.get_default_dtype()


_FAMILIES = {
    "FluxTransformerBlock": Family(find_flux, joint_arguments),
    "FluxSingleTransformerBlock": Family(find_flux_single, joint_arguments),
    "Flux2TransformerBlock": Family(find_flux2, joint_arguments),
    "Flux2SingleTransformerBlock": Family(find_flux2_parallel, parallel_arguments),
    "QwenImageTransformerBlock": Family(find_qwen, joint_arguments),
    "JointTransformerBlock": Family(find_sd3, joint_arguments),
    "HunyuanVideoTransformerBlock": Family(find_hunyuan_video, joint_arguments),
    "HunyuanVideoSingleTransformerBlock": Family(find_hunyuan_video_single, joint_arguments),
    "WanTransformerBlock": Family(find_wan, cross_arguments),
    "BasicTransformerBlock": Family(find_basic, basic_arguments),
}
