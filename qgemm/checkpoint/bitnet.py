"""Checkpoints of BitNet: weights of -1, 0 and 1 with one scale per tensor, and int8 activations with one per token.

``weight`` is uint8 ``[N / 4, K]``: row ``r`` contains rows ``r``, ``r + N / 4``, ... of the weight, plus 1, in two bits
each, low bits first. ``weight_scale`` ``[1]`` is a factor if ``linear_class`` is autobitlinear, and a divisor if it is
bitlinear. In int8 such a layer computes the same; its weight takes four times as much memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import unsupported
from qgemm.checkpoint.float_layers import check_scale, for_each, matrix
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import FLOAT_DTYPES, split_name
from qgemm.numerics.formats import INT8
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "bitnet"
_IN_A_BYTE = 4
_TO_SCALE: dict[str, Callable[[Tensor], Tensor]] = {"autobitlinear": Tensor.float, "bitlinear": lambda s: 1 / s.float()}


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint from its ``quantization_config`` and stored tensors.

    Raises ``CheckpointError`` for layers that round float weights in each call, or that normalize their input.
    """
    kind = quantization.get("linear_class", "bitlinear")
    to_scale = _TO_SCALE.get(kind) if isinstance(kind, str) else None
    if to_scale is None:
        raise unsupported(f"{config_path}: linear_class is {kind!r}; qgemm reads 'bitlinear' and 'autobitlinear'")
    mode = quantization.get("quantization_mode", "offline")
    if kind == "autobitlinear" and mode != "offline":
        raise unsupported(f"{config_path}: quantization_mode is {mode!r}; qgemm reads 'offline' alone")
    if quantization.get("use_rms_norm"):
        raise unsupported(f"{config_path}: use_rms_norm has each layer normalize its input, which qgemm doesn't do")
    contents = Contents.of_files(stored)
    for name in stored:
        layer, leaf = split_name(name)
        if leaf == "weight_scale":
            if kind == "autobitlinear" and f"{layer}.bias" in stored:
                raise unsupported(f"{config_path}: {layer} has a bias, which autobitlinear multiplies by the scale")
            _note_layer(contents, layer, to_scale)
    return contents


def _note_layer(contents: Contents, layer: str, to_scale: Callable[[Tensor], Tensor]) -> None:
    weight, scale = f"{layer}.weight", f"{layer}.weight_scale"
    rows, K = matrix(contents, layer, "weight", torch.uint8).shape
    N = _IN_A_BYTE * rows
    check_scale(contents, scale, FLOAT_DTYPES, {(), (1,)})
    contents.convert(weight, weight, (N, K), _unpacked, INT8.storage)
    contents.convert(scale, scale, (N,), partial(_scales, to_scale, N))
    contents.manifest.layers[layer] = resolve_scheme("int8")
    contents.shapes[layer] = (N, K)


def _scales(to_scale: Callable[[Tensor], Tensor], N: int, value: Tensor) -> Tensor:
    """One scale per row; raises ``ValueError`` for a value that isn't finite: 1 / Inf would be a valid scale."""
    if not bool(value.isfinite().all()):
        raise ValueError("holds NaN or Inf")
    return for_each(to_scale(value), N)


def _unpacked(octets: Tensor) -> Tensor:
    """The values, int8 ``[N, K]``. Raises ``ValueError`` for a value of 2."""
    if bool((octets & (octets >> 1) & 0x55).any()):
        raise ValueError("holds a value of 2, where all are -1, 0 or 1")
    return torch.cat([(octets >> 2 * i & 3).to(INT8.storage) - 1 for i in range(_IN_A_BYTE)])
