"""Checkpoints in fp8: of DeepSeek and transformers' ``FineGrainedFP8Config``, of AutoFP8, and of FBGEMM.

| ``quant_method`` | tensors of a layer ``[N, K]`` beside ``weight``, e4m3 |
|---|---|
| fp8, in blocks | ``weight_scale_inv``, or ``scale``, for each block of 128 x 128; the last ones may be shorter |
| fp8, per tensor | ``weight_scale_inv`` or ``weight_scale``; static: ``activation_scale`` or ``input_scale`` |
| fbgemm_fp8 | ``weight_scale`` ``[N, 1]`` |

Fused experts have the same tensors for each weight: in blocks, ``gate_up_proj`` ``[E, N, K]`` and
``gate_up_proj_scale_inv``; in FBGEMM, which Llama 4 uses, ``[E, K, N]`` and ``gate_up_proj_scale`` ``[E, 1, N]``;
``down_proj`` likewise.

``W = weight * scale``, whatever the scale is called. The size of blocks comes from the config, because the sizes of the
weight and of its scales don't determine it. If its ``activation_scheme`` is null, activations stay in float. The files
tell which layers are quantized.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from qgemm.checkpoint.cache_scales import leave_to_cache
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.float_layers import SCALE_DTYPES, check_scale, note_fp8, note_input_scale
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.signs import note_scaled
from qgemm.checkpoint.tensors import FLOAT_DTYPES, split_name
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FP8
from qgemm.numerics.integers import cdiv
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "fp8"
FBGEMM = "fbgemm_fp8"
_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_INPUT_SCALES = ("activation_scale", "input_scale")


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint with ``quant_method`` fp8 and these stored tensors.

    Raises ``CheckpointError``, naming the layer, for anything that qgemm can't compute.
    """
    if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(f"{config_path}: fmt is {quantization['fmt']!r}; qgemm reads fp8 in e4m3")
    block, scheme = quantization.get("weight_block_size"), quantization.get("activation_scheme", "dynamic")
    if block is not None and block != [BLOCK, BLOCK]:
        raise unsupported(f"{config_path}: weight_block_size is {block!r}; qgemm computes blocks of 128 x 128")
    leaves_float = scheme is None and block is None  # as Quark writes weights alone
    if scheme not in ("dynamic", "static") and not leaves_float:
        raise CheckpointError(f"{config_path}: activation_scheme is {scheme!r}; it must be 'dynamic' or 'static'")
    contents = Contents.of_files(stored)
    for layer, leaf in _find_layers(contents):
        if leaves_float:
            note_fp8(contents, layer, resolve_scheme("fp8-weight"), leaf)
        else:
            _note_layer(contents, layer, leaf, block is not None, scheme == "static", config_path)
    for experts, leaf in _find_experts(contents):
        if block is None or scheme == "static":
            raise unsupported(
                f"{config_path}: {experts} holds fused experts in fp8 without blocks or with static "
                "activations, which qgemm doesn't read"
            )
        _note_experts_in_blocks(contents, experts, leaf)
    if scheme == "dynamic" and (scale_format := quantization.get("scale_fmt")) is not None:
        kind = "powers of two" if scale_format == "ue8m0" else repr(scale_format)
        contents.note(f"scales of activations stay in float32, where the checkpoint asks for {kind} (scale_fmt)")
    leave_to_cache(contents, quantization)
    return contents


def _find_layers(contents: Contents) -> list[tuple[str, str]]:
    """Each layer in fp8, with the name of its scale."""
    found = []
    for name in contents.stored:
        layer, leaf = split_name(name)
        weight = contents.stored.get(f"{layer}.weight")
        if leaf in _SCALES and (leaf != "scale" or (weight is not None and weight.dtype == FP8.storage)):
            found.append((layer, leaf))
    return found


def _find_experts(contents: Contents) -> list[tuple[str, str]]:
    """The modules with fused experts, with each of their weights that has a scale."""
    found = []
    for name, tensor in contents.stored.items():
        experts, leaf = split_name(name)
        ends = (f"{name}_scale_inv", f"{name}_scale")
        if tensor.dtype == FP8.storage and len(tensor.shape) == 3 and any(end in contents.stored for end in ends):
            found.append((experts, leaf))
    return found


def _note_experts_in_blocks(contents: Contents, experts: str, leaf: str) -> None:
    """``[E, N, K]`` with a scale for each block of a matrix, as in qgemm."""
    weight = f"{experts}.{leaf}"
    E, N, K = contents.stored[weight].shape
    scale, grid = f"{weight}_scale_inv", (E, cdiv(N, BLOCK), cdiv(K, BLOCK))
    check_scale(contents, scale, SCALE_DTYPES, {grid})
    note_scaled(contents, (weight, scale), (weight, f"{weight}_scale"), ((E, N, K), grid), block=(BLOCK, BLOCK))
    contents.manifest.layers[experts] = resolve_scheme("fp8-block")


def _note_experts_by_row(contents: Contents, experts: str, leaf: str) -> None:
    """Llama 4's ``[E, K, N]`` with a scale for each output, ``[E, 1, N]`` or ``[E, N, 1]``."""
    name = f"{experts}.{leaf}"
    E, K, N = contents.stored[name].shape
    check_scale(contents, f"{name}_scale", FLOAT_DTYPES, {(E, 1, N), (E, N, 1)})
    names = name, f"{name}_scale"
    note_scaled(contents, names, names, ((E, N, K), (E, N)), lambda scale: scale.float().reshape(E, N), _outputs_first)
    contents.manifest.layers[experts] = resolve_scheme("fp8")


def _outputs_first(weight: Tensor) -> Tensor:
    return weight.transpose(1, 2).contiguous()


def _note_layer(contents: Contents, layer: str, leaf: str, in_blocks: bool, is_static: bool, config_path: Path) -> None:
    scale = contents.stored[f"{layer}.{leaf}"]
    given = [each for each in _INPUT_SCALES if f"{layer}.{each}" in contents.stored]
    if len(given) != is_static:
        said, has = ("static", "no activation_scale") if is_static else ("dynamic", f"an {given[0]}")
        raise CheckpointError(f"{config_path}: activations are {said}, but layer {layer} has {has}")
    has_blocks = in_blocks and len(scale.shape) == 2
    if has_blocks and is_static:
        raise unsupported(f"{config_path}: {layer} has blocks and static activations, which qgemm doesn't compute")
    note_fp8(contents, layer, resolve_scheme("fp8-block" if has_blocks else "fp8-static" if is_static else "fp8"), leaf)
    if is_static:
        note_input_scale(contents, layer, given[0])


def read_fbgemm(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint in FBGEMM's fp8; raises as ``read`` does."""
    contents = Contents.of_files(stored)
    for layer, leaf in _find_layers(contents):
        _note_layer(contents, layer, leaf, False, False, config_path)
    for experts, leaf in _find_experts(contents):
        _note_experts_by_row(contents, experts, leaf)
    if (bound := quantization.get("activation_scale_ub")) is not None:
        contents.note(f"activations are not cut off at activation_scale_ub ({bound!r}): a larger one keeps its value")
    return contents
