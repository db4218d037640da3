"""Finds blocks of Flux 1 and 2, Qwen-Image, Stable Diffusion 3 and HunyuanVideo: ``nn/blocks/diffusion_joint.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from qgemm.fusion.branches import NotFused, merge
from qgemm.fusion.diffusion_parts import (
    GELU,
    check_is_swiglu,
    fields_of,
    find_attention,
    find_head_norms,
    find_layer,
    find_mlp,
    find_modulated,
    merge_layers,
)
from qgemm.fusion.probe import normal, uniform
from qgemm.nn.blocks.diffusion import IMAGE, TEXT, TIME, BlockAttention, Positions
from qgemm.nn.blocks.diffusion_joint import (
    ANGLES,
    MASK,
    FusedJointBlock,
    FusedParallelBlock,
    FusedSingleBlock,
    OwnAttention,
    Stream,
    StreamsBlock,
)
from qgemm.nn.blocks.merged import why_apart
from qgemm.nn.blocks.mlp import FusedMlp

_HUNYUAN_VIDEO, _SD3 = "HunyuanVideoAttnProcessor2_0", "JointAttnProcessor2_0"
_BATCH, _TEXT_TOKENS, _IMAGE_TOKENS = 2, 5, 12


class Names(NamedTuple):
    """The dotted names of a stream's modules.

    ``modulation``: the modules called on the time step's embedding, the argument ``time``; ``norms``: the norms before
    the branches; ``own``: a second attention, of the stream alone.
    """

    modulation: tuple[str, ...]
    norms: tuple[str, ...]
    qkv: tuple[str, ...]
    head_norms: tuple[str, str]
    out: str
    mlp: str
    time: str = TIME
    own: str = ""


_LEAVES = ("to_q", "to_k", "to_v")
_QKV = tuple([f"attn.{leaf}" for leaf in _LEAVES])
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


_TEXT_FIRST, _IMAGE_FIRST = (TEXT, IMAGE), (IMAGE, TEXT)
_OF_FLUX = {TEXT: _TEXT, IMAGE: _IMAGE}

FindPositions: TypeAlias = Callable[[Mapping[str, Any], int], tuple[Positions, ...]]


def find_flux(block: nn.Module) -> FusedJointBlock:
    """Flux's block of two streams."""
    return _find_joint(block, "FluxAttnProcessor", _OF_FLUX, _TEXT_FIRST, _real_positions, limited=(TEXT,))


def find_qwen(block: nn.Module) -> FusedJointBlock:
    """Qwen-Image's block."""
    if getattr(block, "zero_cond_t", True):
        raise NotFused("it modulates some tokens of an image in another way than others")
    image = Names(("img_mod.0", "img_mod.1"), ("img_norm1", "img_norm2"), *_IMAGE_QKV, "img_mlp")
    text = Names(("txt_mod.0", "txt_mod.1"), ("txt_norm1", "txt_norm2"), *_TEXT_QKV, "txt_mlp")
    streams, processor = {TEXT: text, IMAGE: image}, "QwenDoubleStreamAttnProcessor2_0"
    return _find_joint(block, processor, streams, _TEXT_FIRST, _complex_positions, limited=_TEXT_FIRST)


def find_sd3(block: nn.Module) -> FusedJointBlock:
    """Stable Diffusion 3's block."""
    if getattr(block, "context_pre_only", True):
        raise NotFused("it returns no text")
    if block._chunk_size is not None:
        raise NotFused("its MLPs are computed in chunks")
    image = _IMAGE
    if block.use_dual_attention:  # 3.5 Medium's
        image = image._replace(norms=(*image.norms, image.norms[0]), own="attn2")
    return _find_joint(block, _SD3, {TEXT: _TEXT, IMAGE: image}, _IMAGE_FIRST, _no_positions)


def find_hunyuan_video(block: nn.Module) -> FusedJointBlock:
    """HunyuanVideo's block of two streams."""
    return _find_joint(block, _HUNYUAN_VIDEO, _OF_FLUX, _IMAGE_FIRST, _positions_of_first, returned=_IMAGE_FIRST)


def _find_joint(
    block: nn.Module,
    processor: str,
    streams: Mapping[str, Names],
    order: tuple[str, str],
    find_positions: FindPositions,
    limited: tuple[str, ...] = (),
    returned: tuple[str, str] = _TEXT_FIRST,
) -> FusedJointBlock:
    """A block of two ``streams``, by the names of their tokens, which attention reads in this ``order``."""
    attention = find_attention(block, "attn", processor)
    first, second = (_find_stream(block, streams[name]) for name in order)
    others = fields_of(block, {*first.modulation, *second.modulation})
    return FusedJointBlock(attention, order, limited, find_positions, first, second, returned=returned, **others)


def find_flux_single(block: nn.Module) -> FusedSingleBlock:
    """Flux's block of one stream."""
    return _find_single(block, "FluxAttnProcessor", _TEXT_FIRST, _positions_of_all, limited=_TEXT_FIRST)


def find_hunyuan_video_single(block: nn.Module) -> FusedSingleBlock:
    """HunyuanVideo's block of one stream."""
    return _find_single(block, _HUNYUAN_VIDEO, _IMAGE_FIRST, _positions_of_first)


def _find_single(
    block: nn.Module,
    processor: str,
    order: tuple[str, str],
    find_positions: FindPositions,
    limited: tuple[str, ...] = (),
) -> FusedSingleBlock:
    attention = find_attention(block, "attn", processor)
    shared = [find_layer(block, name) for name in (*_QKV, "proj_mlp")]
    if reason := why_apart(shared):
        raise NotFused(reason)
    act = block.get_submodule("act_mlp")
    if type(act) is not nn.GELU:
        raise NotFused(f"its activation is of class {type(act).__name__}, not GELU")
    out, qkv = merge_layers(block, "proj_out"), merge(shared[:3])
    mlp = FusedMlp(merge(shared[3:]), out, act, GELU[act.approximate], gated=False)
    modulation = tuple(map(block.get_submodule, ("norm.silu", "norm.linear")))
    norms = find_head_norms(block, _IMAGE.head_norms)
    stream = Stream(TIME, modulation, (find_modulated(block, "norm.norm"),), qkv, norms, out, mlp)
    others = fields_of(block, {*modulation})
    return FusedSingleBlock(attention, order, limited, find_positions, stream, returned=order, **others)


def find_flux2(block: nn.Module) -> FusedJointBlock:
    """Flux 2's block of two streams."""
    image = Names((), ("norm1", "norm2"), *_IMAGE_QKV, "ff", "temb_mod_img")
    text = Names((), ("norm1_context", "norm2_context"), *_TEXT_QKV, "ff_context", "temb_mod_txt")
    streams = {IMAGE: image, TEXT: text}
    return _find_joint(block, "Flux2AttnProcessor", streams, _TEXT_FIRST, _real_positions, limited=(TEXT,))


def find_flux2_parallel(block: nn.Module) -> FusedParallelBlock:
    """Flux 2's block of all tokens."""
    module: Any = block.get_submodule("attn")
    into, out = (find_layer(block, f"attn.{name}") for name in ("to_qkv_mlp_proj", "to_out"))
    attention = find_attention(block, "attn", "Flux2ParallelSelfAttnProcessor", module.inner_dim)
    check_is_swiglu(module.mlp_act_fn)
    norms = find_head_norms(block, _IMAGE.head_norms)
    if norms is None or attention.head_dim != module.head_dim:
        raise NotFused("its queries and keys have no norms, or their heads another size")
    return FusedParallelBlock(
        attention, "temb_mod", find_modulated(block, "norm"), merge([into]), norms, merge([out]), "silu",
        _positions_of_all, returned=(IMAGE,), **fields_of(block),
    )  # fmt: skip


def _find_stream(block: nn.Module, names: Names) -> Stream:
    modulation = tuple(map(block.get_submodule, names.modulation))
    if modulation and type(modulation[0]) is not nn.SiLU:
        raise NotFused(f"its modulation begins with a {type(modulation[0]).__name__}, not SiLU")
    before = tuple(find_modulated(block, name) for name in names.norms)
    mlp = find_mlp(block.get_submodule(names.mlp))
    qkv, out = merge_layers(block, *names.qkv), merge_layers(block, names.out)
    own = _find_own_attention(block, names.own) if names.own else None
    return Stream(names.time, modulation, before, qkv, find_head_norms(block, names.head_norms), out, mlp, own)


def _find_own_attention(block: nn.Module, name: str) -> OwnAttention:
    """Stable Diffusion 3's second attention."""
    attention = find_attention(block, name, _SD3)
    qkv = merge_layers(block, *(f"{name}.{leaf}" for leaf in _LEAVES))
    norms = find_head_norms(block, (f"{name}.norm_q", f"{name}.norm_k"))
    if norms is None:
        raise NotFused(f"queries and keys of {name} have no norms")
    return OwnAttention(attention, qkv, norms, merge_layers(block, f"{name}.to_out.0"))


def parallel_arguments(fused: FusedParallelBlock, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Random arguments for a block of all tokens."""
    generator = torch.Generator().manual_seed(0)
    K, angles = fused.into.layers[0].in_features, _random_angles(fused.attention, _IMAGE_TOKENS, generator, device)
    sizes: dict[str, tuple[int, ...]] = {IMAGE: (_BATCH, _IMAGE_TOKENS, K), fused.time: (_BATCH, 3 * K)}
    made = {name: normal(size, generator).to(device, dtype) for name, size in sizes.items()}
    return [{**made, ANGLES[0]: _twice(angles)}]


def _random_angles(attention: BlockAttention, tokens: int, generator: torch.Generator, device: torch.device) -> Tensor:
    return (uniform((tokens, attention.head_dim // 2), generator) * 6.28).to(device)


def _twice(angles: Tensor) -> tuple[Tensor, Tensor]:
    angles = angles.repeat_interleave(2, dim=1)
    return angles.cos(), angles.sin()


def joint_arguments(fused: StreamsBlock, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Random arguments for a block, for a call each."""
    generator = torch.Generator().manual_seed(0)
    K = fused.streams[0].qkv.layers[0].in_features
    sizes: dict[str, tuple[int, ...]] = {TEXT: (_BATCH, _TEXT_TOKENS, K), IMAGE: (_BATCH, _IMAGE_TOKENS, K)}
    for stream in fused.streams:
        sizes[stream.time] = (_BATCH, K if stream.modulation else 3 * len(stream.before) * K)
    made: dict[str, Any] = {name: normal(size, generator).to(device, dtype) for name, size in sizes.items()}
    for name in {*ANGLES} & fused.defaults.keys():
        tokens = _IMAGE_TOKENS + (0 if fused.find_positions is _positions_of_first else _TEXT_TOKENS)
        angles = _random_angles(fused.attention, tokens, generator, device)
        if fused.find_positions is _complex_positions:
            turned = torch.polar(torch.ones_like(angles), angles)
            made[name] = turned[_TEXT_TOKENS:], turned[:_TEXT_TOKENS]
        else:
            made[name] = _twice(angles)
    if MASK in fused.defaults:
        made[MASK] = (uniform((_BATCH, 1, 1, _TEXT_TOKENS + _IMAGE_TOKENS), generator) < 0.8).to(device)
    return [made]


def _angles_of(context: Mapping[str, Any]) -> Any:
    return next((context[name] for name in ANGLES if context.get(name) is not None), None)


def _positions_of_all(context: Mapping[str, Any], first: int) -> tuple[Positions]:
    """Flux's: cosines and sines ``[S, D]`` of all tokens, each value twice."""
    angles = _angles_of(context)
    if angles is None:
        return (None,)
    cos, sin = (each[None, :, ::2].float() for each in angles)
    return ((cos, sin),)


def _real_positions(context: Mapping[str, Any], first: int) -> tuple[Positions, Positions]:
    """The same, of the first tokens and of the others."""
    (positions,) = _positions_of_all(context, first)
    if positions is None:
        return None, None
    cos, sin = positions
    return (cos[:, :first], sin[:, :first]), (cos[:, first:], sin[:, first:])


def _positions_of_first(context: Mapping[str, Any], first: int) -> tuple[Positions, Positions]:
    """HunyuanVideo's: cosines and sines of the image; a text has none."""
    return *_positions_of_all(context, first), None


def _complex_positions(context: Mapping[str, Any], first: int) -> tuple[Positions, Positions]:
    """Qwen-Image's: complex numbers ``[S, D / 2]`` of the image and of the text."""
    angles = _angles_of(context)
    if angles is None:
        return None, None
    image, text = ((each.real[None], each.imag[None]) for each in angles)
    return text, image


def _no_positions(context: Mapping[str, Any], first: int) -> tuple[Positions, Positions]:
    return None, None
