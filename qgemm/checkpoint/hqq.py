"""Checkpoints of HQQ in safetensors files: weights of 1 to 8 bits, ``W = (q - zero) * scale`` with float zero points.

In a layer ``[N, K]`` with groups of columns (axis 1), of which there are ``G`` in all rows together:

- ``<layer>.W_q``: uint8 ``[G, group size]``, of 5 and 6 bits too. In 1, 2 and 4 bits it has a part of these rows: those
  of the first part are in the highest bits, those of the last in the lowest ones. In 3 bits it is int32
  ``[ceil(G / 10), group size]``, with ten parts, of which the last may be shorter;
- ``<layer>.scale`` and ``<layer>.zero``: floats ``[G, 1]``, in the model's dtype;
- ``<layer>.nbits``, ``group_size``, ``axis`` and ``shape``, ``[N, K]``: whole numbers, which say what the layer is; and
  others that follow from these. ``nbits`` 1.58 stands for values 0, 1 and 2, which are stored in 2 bits.

Stored as ``q - 8`` or ``q - 128``, a weight is ``q * scale + zero_point`` with ``zero_point = (8 - zero) * scale``, in
float32. Fewer than 4 bits become int4, 5 and 6 bits int8, and are stored as ``q``.

Groups of rows (axis 0) give each column of a row a scale of its own, which no scheme has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.float_layers import check_scale
from qgemm.checkpoint.packed_layers import scheme_in_file
from qgemm.checkpoint.safetensors_file import StoredTensor, read_values, unfit
from qgemm.checkpoint.tensors import BIAS_DTYPES, split_name
from qgemm.checkpoint.words import by_rows
from qgemm.numerics.formats import INT8
from qgemm.numerics.groups import stored_weight
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import pack_codes

QUANT_METHOD = "hqq"
WEIGHT = "W_q"
# By the number of bits, how many groups a row of ``W_q`` has: in its highest bits the first.
_PARTS = {1: 8, 2: 4, 3: 10, 4: 2, 5: 1, 6: 1, 8: 1}
# What is subtracted from stored values.
_MIDDLES = {4: 8, 8: 128}
_WHOLE = "a whole number, or two for the shape"
_NUMBERS = ("nbits", "group_size", "axis", "shape")
# Of the library's own use, or said by other tensors too.
_OTHERS = ("packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype") + (
    "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint whose files say themselves what each layer is.

    Raises ``CheckpointError``, naming the layer, for other bits, groups of rows, and weights stored as floats.
    """
    contents = Contents.of_files(stored)
    layers = [layer for layer, leaf in map(split_name, stored) if leaf == WEIGHT]
    numbers = {f"{layer}.{leaf}": layer for layer in layers for leaf in _NUMBERS}
    wanted = {name: stored[name] for name in numbers if name in stored}
    for name, tensor in wanted.items():
        if tensor.dtype is None or tensor.shape not in ((), (1,), (2,)):
            raise unfit(tensor.path, name, tensor, _WHOLE)
    said: dict[str, dict[str, list[int]]] = {layer: {} for layer in layers}
    for name, value in read_values(wanted, torch.device("cpu")):
        leaf = split_name(name)[1]
        if value.is_floating_point():
            if leaf != "nbits" or value.numel() > 1 or round(float(value), 2) != 1.58:
                raise unfit(wanted[name].path, name, wanted[name], _WHOLE)
            value = torch.tensor(2)  # as which they are stored
        said[numbers[name]][leaf] = value.flatten().tolist()
    for layer in layers:
        _note(contents, layer, said[layer])
    return contents


def _note(contents: Contents, layer: str, said: dict[str, list[int]]) -> None:
    names = [f"{layer}.{leaf}" for leaf in (WEIGHT, "scale", "zero")]
    weight = contents.stored[names[0]]
    path = weight.path
    bits, axis, size, (N, K) = _sizes(layer, said, path)
    if bits not in _PARTS or axis != 1:
        raise unsupported(f"{path}: {layer} has {bits} bits, axis {axis}; qgemm reads HQQ of 1 to 6 and 8 bits, axis 1")
    groups = N * K // size
    dtype, rows = torch.int32 if bits == 3 else torch.uint8, cdiv(groups, _PARTS[bits])
    if weight.dtype != dtype or weight.shape != (rows, size):
        raise unfit(path, names[0], weight, f"{dtype} {[rows, size]}, not viewed as floats")
    for name in names[1:]:
        check_scale(contents, name, BIAS_DTYPES, {(groups, 1)})
    groups_or_row = None if size == K else size
    scheme = scheme_in_file(path, layer, 4 if bits <= 4 else 8, groups_or_row, symmetric=False, float_zeros=True)
    shape, stored = (N, K // size), stored_weight(N, K, scheme.weight.format)
    made = {
        f"{layer}.weight_scale": (names[1], shape, contents.stored[names[1]].dtype),
        f"{layer}.weight_zero_point": (names[2], shape, torch.float32),
    }
    contents.convert(f"{layer}.weight", names[0], stored[0], partial(_values, bits=bits, N=N, K=K), stored[1])
    contents.convert_together(names[1:], made, partial(_factors, bits=bits, shape=shape))
    for leaf in (*_NUMBERS, *_OTHERS):
        if f"{layer}.{leaf}" in contents.headers:
            contents.pass_over(f"{layer}.{leaf}")
    contents.manifest.layers[layer] = scheme
    contents.shapes[layer] = N, K


def _sizes(layer: str, said: dict[str, list[int]], path: Path) -> tuple[int, int, int, tuple[int, int]]:
    """Bits, axis, group size and shape. Raises ``CheckpointError`` unless a row has whole groups."""
    for leaf in _NUMBERS:
        if len(said.get(leaf, ())) != (2 if leaf == "shape" else 1):
            raise CheckpointError(f"{path}: {layer}.{leaf} is {said.get(leaf)}, which doesn't say what the layer is")
    (bits,), (size,), (axis,), (N, K) = (said[leaf] for leaf in _NUMBERS)
    if N < 1 or K < 1 or (axis == 1 and (size < 1 or K % size)):
        raise CheckpointError(f"{path}: {layer} has the shape {[N, K]}, in groups of {size} columns")
    return bits, axis, size, (N, K)


def _values(value: Tensor, bits: int, N: int, K: int) -> Tensor:
    """The stored weight, packed if it has up to 4 bits."""
    if bits > 4:
        if bits < 8 and bool((value >> bits).any()):
            raise ValueError(f"values go up to {int(value.max())}; those of {bits} bits go up to {(1 << bits) - 1}")
        return (value ^ _MIDDLES.get(bits, 0)).view(INT8.storage).reshape(N, K)
    # The parts of the groups are those of the rows where their number divides N.
    last, mask = _PARTS[bits] - 1, (1 << bits) - 1
    parts = [((value >> bits * (last - part)) & mask).to(torch.uint8) for part in range(last + 1)]
    codes = torch.cat(parts).flatten()[: N * K].view(N, K)
    return by_rows(lambda rows: pack_codes(rows ^ _MIDDLES.get(bits, 0)), codes, K)


def _factors(scale: Tensor, zero: Tensor, bits: int, shape: tuple[int, int]) -> Sequence[Tensor]:
    zero_point = (_MIDDLES.get(bits, 0) - zero.float()) * scale.float()
    return scale.reshape(shape), zero_point.reshape(shape)
