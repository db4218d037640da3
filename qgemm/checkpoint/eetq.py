"""Checkpoints of EETQ, as transformers and its own library write them: int8 weights in the order of CUDA's kernels.

In a layer ``[N, K]``, ``<layer>.weight``, or ``qweight``, is int8 ``[K, N]``, of ``q + 128`` in another order, and
``<layer>.weight_scales`` ``[N]``: ``W = q * scale``.

The order is that of GPUs from Turing (sm_75) on; on Volta, files have another one, which nothing in them shows. In
memory, two rows of the weight follow each other, 64 columns of the one and 64 of the other in turn; and of 16 columns
the order is 0 8 1 9 2 10, and so on to 7 15.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import unsupported
from qgemm.checkpoint.float_layers import check_scale
from qgemm.checkpoint.safetensors_file import StoredTensor, unfit
from qgemm.checkpoint.tensors import BIAS_DTYPES, split_name
from qgemm.checkpoint.words import by_rows
from qgemm.numerics.formats import INT8
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "eetq"
SCALES = "weight_scales"
_TILE = 64


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint of EETQ's. Raises ``CheckpointError``, naming the layer, for other bits."""
    if (bits := quantization.get("weights", "int8")) != "int8":
        raise unsupported(f"{config_path}: weights is {bits!r}; qgemm reads EETQ of int8")
    contents = Contents.of_files(stored)
    for name in stored:
        layer, leaf = split_name(name)
        if leaf == SCALES:
            _note(contents, layer)
    return contents


def _note(contents: Contents, layer: str) -> None:
    name = f"{layer}.qweight" if f"{layer}.qweight" in contents.stored else f"{layer}.weight"
    weight, scales = contents.stored.get(name), f"{layer}.{SCALES}"
    if weight is None or weight.dtype != INT8.storage or len(weight.shape) != 2:
        raise unfit(contents.stored[scales].path, name, weight, "torch.int8, [K, N]")
    K, N = weight.shape
    if N % 2 or K % _TILE:
        raise unfit(weight.path, name, weight, f"of a multiple of {_TILE} rows and of 2 columns, [K, N]")
    dtype = check_scale(contents, scales, BIAS_DTYPES, {(N,)}).dtype
    contents.convert(f"{layer}.weight", name, (N, K), partial(_values, N=N, K=K), INT8.storage)
    contents.convert(f"{layer}.weight_scale", scales, (N, 1), lambda value: value[:, None].clone(), dtype)
    contents.manifest.layers[layer] = resolve_scheme("int8-weight")
    contents.shapes[layer] = N, K


def _values(value: Tensor, N: int, K: int) -> Tensor:
    def to_rows(pairs: Tensor) -> Tensor:
        tiles = pairs.view(len(pairs), K // _TILE, 2, _TILE).transpose(1, 2)
        return tiles.reshape(len(pairs), -1, 8, 2).mT.reshape(pairs.shape)

    octets = by_rows(to_rows, value.contiguous().view(torch.uint8).view(N // 2, 2 * K), 2 * K)
    return (octets ^ 128).view(INT8.storage).view(N, K)
