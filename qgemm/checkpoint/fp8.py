"""Checkpoints in fp8: of DeepSeek and transformers' ``FineGrainedFP8Config``, of AutoFP8, and of FBGEMM.

| ``quant_method`` | tensors of a layer ``[N, K]`` beside ``weight``, e4m3 |
|---|---|
| fp8, in blocks | ``weight_scale_inv``, or ``scale``, for each block of 128 x 128; the last ones may be shorter |
| fp8, per tensor | ``weight_scale_inv`` or ``weight_scale``; static: ``activation_scale`` or ``input_scale`` |
| fbgemm_fp8 | ``weight_scale`` ``[N, 1]`` |

``W = weight * scale``, whatever the scale is called. The size of blocks is the config's: it doesn't follow from that of
the weight and the number of its scales. Which layers are quantized, the files say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qgemm.checkpoint.cache_scales import leave_to_cache
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.float_layers import note_fp8, note_input_scale
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import split_name
from qgemm.numerics.formats import FP8
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "fp8"
FBGEMM = "fbgemm_fp8"
_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_INPUT_SCALES = ("activation_scale", "input_scale")
_BLOCK = resolve_scheme("fp8-block").weight.block


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """The contents of a checkpoint with ``quant_method`` fp8 and tensors such as these.

    Raises ``CheckpointError``, naming the layer, for what qgemm can't compute.
    """
    if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"{config_path}: fmt is {quantization['fmt']!r}; qgemm reads fp8 in e4m3")
    block, scheme = quantization.get("weight_block_size"), quantization.get("activation_scheme", "dynamic")
    if block is not None and (not isinstance(block, list) or tuple(block) != _BLOCK):
        raise CheckpointError(f"{config_path}: weight_block_size is {block!r}; qgemm computes blocks of 128 x 128")
    if scheme not in ("dynamic", "static"):
        raise CheckpointError(f"{config_path}: activation_scheme is {scheme!r}; it must be 'dynamic' or 'static'")
    contents = Contents(Manifest({}, {}), stored, dict(stored), is_foreign=True)
    for layer, leaf in _find_layers(contents, config_path):
        _note_layer(contents, layer, leaf, block is not None, scheme == "static", config_path)
    leave_to_cache(contents)
    return contents


def _find_layers(contents: Contents, config_path: Path) -> list[tuple[str, str]]:
    """Each layer in fp8, with what its scale is called. Raises ``CheckpointError`` for fused experts."""
    found = []
    for name in contents.stored:
        layer, leaf = split_name(name)
        weight = contents.stored.get(f"{layer}.weight")
        if leaf in _SCALES and (leaf != "scale" or (weight is not None and weight.dtype == FP8.storage)):
            found.append((layer, leaf))
        experts = contents.stored.get(name.removesuffix("_scale_inv").removesuffix("_scale"))
        if experts is not None and name.endswith(("_scale_inv", "_scale")) and len(experts.shape) == 3:
            raise CheckpointError(f"{config_path}: {layer} holds fused experts in fp8, which qgemm doesn't compute yet")
    return found


def _note_layer(contents: Contents, layer: str, leaf: str, in_blocks: bool, is_static: bool, config_path: Path) -> None:
    scale = contents.stored[f"{layer}.{leaf}"]
    given = [each for each in _INPUT_SCALES if f"{layer}.{each}" in contents.stored]
    if len(given) != is_static:
        said, has = ("static", "no activation_scale") if is_static else ("dynamic", f"an {given[0]}")
        raise CheckpointError(f"{config_path}: activations are {said}, but layer {layer} has {has}")
    has_blocks = in_blocks and len(scale.shape) == 2
    if has_blocks and is_static:
        raise CheckpointError(f"{config_path}: {layer} has blocks and static activations, which qgemm doesn't compute")
    note_fp8(contents, layer, resolve_scheme("fp8-block" if has_blocks else "fp8-static" if is_static else "fp8"), leaf)
    if is_static:
        note_input_scale(contents, layer, given[0])


def read_fbgemm(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """The contents of a checkpoint of FBGEMM's fp8; raises as ``read`` does."""
    contents = Contents(Manifest({}, {}), stored, dict(stored), is_foreign=True)
    for layer, leaf in _find_layers(contents, config_path):
        _note_layer(contents, layer, leaf, False, False, config_path)
    if (bound := quantization.get("activation_scale_ub")) is not None:
        contents.note(f"activations are not cut off at activation_scale_ub ({bound!r}): a larger one keeps its value")
    return contents
