"""Checkpoints of NVIDIA's ModelOpt: fp8 with static activations, int4, nvfp4, mxfp4, mxfp8, or some of each.

| a layer ``[N, K]`` | tensors |
|---|---|
| fp8 | ``weight`` e4m3, ``weight_scale`` one number or ``[N]``; ``input_scale``, unless activations are per token |
| nvfp4 | ``weight`` uint8 ``[N, K / 2]``, ``weight_scale`` e4m3 ``[N, K / 16]``, ``weight_scale_2``, which |
| | multiplies; ``input_scale`` where activations are nvfp4, too, or fp8 |
| mxfp4 | ``weight`` uint8 ``[N, K / 2]``, ``weight_scale`` uint8 ``[N, K / 32]``; ``input_scale`` of fp8 |
| mxfp8 | ``weight`` e4m3, ``weight_scale`` uint8 ``[N, K / 32]`` |
| int4 | ``weight`` uint8 ``[N / 2, K]``, two rows in a byte, the first in its low bits; ``weight_scale`` float |
| | ``[N, groups]`` |

The files tell what each layer is; the config names the algorithm. AWQ leaves a ``pre_quant_scale`` ``[K]`` to layers
whose input comes from no norm, by which their input is multiplied.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.cache_scales import leave_to_cache
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import unsupported
from qgemm.checkpoint.float_layers import (
    matrix,
    note_fp8,
    note_input_scale,
    note_mxfp4,
    note_mxfp8,
    note_nvfp4,
    note_prescale,
)
from qgemm.checkpoint.packed_layers import scheme_in_file
from qgemm.checkpoint.safetensors_file import StoredTensor, unfit
from qgemm.checkpoint.tensors import BIAS_DTYPES, split_name
from qgemm.checkpoint.words import by_rows
from qgemm.numerics.formats import FP8
from qgemm.numerics.packing import pack_codes, packed_width
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "modelopt"
OTHER_NAMES = ("modelopt_fp8", "modelopt_fp4", "modelopt_nvfp4", "modelopt_mixed")
"""Names that servers use for parts of it, and that some files have."""

CONFIG_FILE = "hf_quant_config.json"
_PRESCALE = "pre_quant_scale"
_PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a ModelOpt checkpoint from its config and stored tensors.

    Raises ``CheckpointError``, naming the layer, for anything that qgemm can't compute.
    """
    inner = quantization.get("quantization")
    asked = inner if isinstance(inner, dict) else quantization
    contents = Contents.of_files(stored)
    for name in stored:
        layer, leaf = split_name(name)
        if leaf == "weight_scale":
            _note_layer(contents, layer, _algorithm_of(layer, asked), config_path)
            if f"{layer}.{_PRESCALE}" in stored:
                note_prescale(contents, layer, _PRESCALE)
    leave_to_cache(contents, {**quantization, **asked})
    return contents


def _algorithm_of(layer: str, asked: dict[str, Any]) -> object:
    """The algorithm of the layer, or of a module that contains it, if the model has several; else the model's."""
    named = asked.get("quantized_layers")
    if isinstance(named, dict):
        parts = layer.split(".")
        holders = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        patterns = [name for name in named if "*" in name and fnmatchcase(layer, name)]
        for name in (*holders, *patterns):
            own = named.get(name)
            if isinstance(own, dict) and "quant_algo" in own:
                return own["quant_algo"]
    return asked.get("quant_algo")


def _note_layer(contents: Contents, layer: str, algorithm: object, config_path: Path) -> None:
    weight, scale = contents.stored.get(f"{layer}.weight"), contents.stored[f"{layer}.weight_scale"]
    has_input_scale = f"{layer}.input_scale" in contents.stored
    has_second = f"{layer}.weight_scale_2" in contents.stored
    is_nvfp4 = has_second and scale.dtype == FP8.storage  # W4A8_AWQ's is float32
    if weight is not None and weight.dtype == torch.uint8 and (is_nvfp4 or scale.dtype == torch.uint8):
        if is_nvfp4:
            note_nvfp4(contents, layer, "weight", "weight_scale_2", divides=False)
        else:
            note_mxfp4(contents, layer, "weight")
        if has_input_scale:
            contents.pass_over(f"{layer}.input_scale")
            kind = "fp8" if str(algorithm).upper().endswith("FP8") else "fp4"
            contents.note(f"activations stay in float, where the checkpoint asks for {kind}")
    elif weight is not None and weight.dtype == torch.uint8 and scale.dtype in BIAS_DTYPES and not has_second:
        _note_int4(contents, layer)
    elif weight is not None and weight.dtype == FP8.storage and scale.dtype == torch.uint8:
        note_mxfp8(contents, layer)
        contents.note("activations stay in float, where the checkpoint asks for fp8")
    elif weight is not None and weight.dtype == FP8.storage and (has_input_scale or algorithm == _PER_TOKEN):
        note_fp8(contents, layer, resolve_scheme("fp8-static" if has_input_scale else "fp8"))
        if has_input_scale:
            note_input_scale(contents, layer)
    else:
        raise unsupported(
            f"{config_path}: {layer} has weight {weight} and weight_scale {scale} ({algorithm}); of ModelOpt, qgemm "
            "reads fp8 with an input_scale or per token, int4, nvfp4, mxfp4 and mxfp8"
        )


def _note_int4(contents: Contents, layer: str) -> None:
    weight = matrix(contents, layer, "weight", torch.uint8)
    N, K = 2 * weight.shape[0], weight.shape[1]
    scale = contents.stored[f"{layer}.weight_scale"]
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    size = K // groups if groups and K % groups == 0 else 0
    if scale.shape != (N, groups) or not size:
        raise unfit(scale.path, f"{layer}.weight_scale", scale, f"[{N}, groups of {K} columns]")
    name = f"{layer}.weight"
    contents.convert(name, name, (N, packed_width(K)), _unpack_pairs, torch.uint8)
    contents.manifest.layers[layer] = scheme_in_file(weight.path, layer, 4, None if size == K else size, True)
    contents.shapes[layer] = N, K


def _unpack_pairs(octets: Tensor) -> Tensor:
    def pack(some: Tensor) -> Tensor:
        pairs = torch.stack((some & 15, some >> 4), dim=1)
        return pack_codes(pairs.flatten(0, 1)).view(len(some), -1)

    return by_rows(pack, octets, 2 * octets.shape[1]).view(2 * len(octets), packed_width(octets.shape[1]))
