"""torchao's weights of 4 bits, whose zero points are floats: ``W = q * scale + zero_point``, with ``q`` from -8 to 7.

In a layer ``[N, K]`` with groups of columns:

- ``Int4Tensor``: ``_weight_qdata`` int8 ``[N, K / 2]``, the even columns in the low four bits, in two's complement;
  ``_weight_scale`` and ``_weight_zero_point``, floats ``[groups, N]``.
- ``Int4TilePackedTo4dTensor``: ``_weight_qdata`` int32 ``[N / 8, K / (16 * tiles), 32, tiles / 2]``, ``q + 8`` in the
  order in which CUDA's tensor cores read tiles of 8 x 16, and ``_weight_scale_and_zero`` ``[groups, N, 2]``. Rows and
  columns are padded.

A layer whose zero points are all 0, as with activations in fp8, is symmetric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.float_layers import check_scale
from qgemm.checkpoint.packed_layers import scheme_in_file
from qgemm.checkpoint.safetensors_file import unfit
from qgemm.checkpoint.tensors import BIAS_DTYPES
from qgemm.checkpoint.words import by_rows, unpack_nibbles
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import pack_codes, packed_width

_LANES, _TILE_ROWS = 32, 8


def _note_plain(contents: Contents, layer: str, about: dict[str, Any], symmetric: bool) -> None:
    names = [f"{layer}._weight_{leaf}" for leaf in ("qdata", "scale", "zero_point")]
    weight = contents.stored[names[0]]
    if weight.dtype != torch.int8 or len(weight.shape) != 2:
        raise unfit(weight.path, names[0], weight, "torch.int8, [N, K / 2]")
    N, K = weight.shape[0], 2 * weight.shape[1]
    size = _group_size(about, layer, weight.path)
    groups = cdiv(K, size)
    for name in names[1:]:
        check_scale(contents, name, BIAS_DTYPES, {(groups, N)})

    def to_weight(value: Tensor) -> Tensor:
        return by_rows(lambda rows: pack_codes(unpack_nibbles(rows.view(torch.uint8))), value, K)

    contents.convert(f"{layer}.weight", names[0], (N, packed_width(K)), to_weight, torch.uint8)
    for name, leaf in zip(names[1:], ("weight_scale", "weight_zero_point"), strict=True):
        if leaf == "weight_zero_point" and symmetric:
            contents.pass_over(name)  # already read
            continue
        dtype = contents.stored[name].dtype
        contents.convert(f"{layer}.{leaf}", name, (N, groups), lambda value: value.t().contiguous(), dtype)
    _add(contents, layer, size, symmetric, (N, K), weight.path)


def _note_tiles(contents: Contents, layer: str, about: dict[str, Any], symmetric: bool) -> None:
    names = [f"{layer}._weight_{leaf}" for leaf in ("qdata", "scale_and_zero")]
    weight, shape = contents.stored[names[0]], about.get("shape")
    if weight.dtype != torch.int32 or len(weight.shape) != 4 or weight.shape[2] != _LANES:
        raise unfit(weight.path, names[0], weight, "torch.int32, [N / 8, K / (16 * tiles), 32, tiles / 2]")
    rows, columns = weight.shape[0] * _TILE_ROWS, weight.shape[1] * weight.shape[3] * 32
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(each) is int and each > 0 for each in shape):
        raise CheckpointError(f"{weight.path}: the shape of {layer}.weight is {shape!r}; it must be [N, K]")
    N, K = shape
    if rows < N or columns < K:
        raise unfit(weight.path, names[0], weight, f"tiles for {shape}")
    size = _group_size(about, layer, weight.path)
    groups = cdiv(K, size)
    dtype = check_scale(contents, names[1], BIAS_DTYPES, {(cdiv(columns, size), rows, 2)}).dtype

    def to_factors(value: Tensor) -> Sequence[Tensor]:
        scale, zero_point = (each.t().contiguous() for each in value[:groups, :N].unbind(-1))
        return scale, zero_point

    contents.convert(f"{layer}.weight", names[0], (N, packed_width(K)), partial(_from_tiles, N=N, K=K), torch.uint8)
    made = {f"{layer}.weight_{leaf}": (names[1], (N, groups), dtype) for leaf in ("scale", "zero_point")}
    contents.convert_together((names[1],), made, to_factors)
    _add(contents, layer, size, False, (N, K), weight.path)


NOTES: dict[str, Callable[[Contents, str, dict[str, Any], bool], None]] = {
    "Int4Tensor": _note_plain,
    "Int4TilePackedTo4dTensor": _note_tiles,
}
"""By torchao's class, a function that notes in ``Contents`` how a layer's tensors are converted.

Its other arguments: the layer, the metadata about its weight, and whether all zero points are 0.
"""


def _group_size(about: dict[str, Any], layer: str, path: Path) -> int:
    block = about.get("block_size")
    size = block[1] if isinstance(block, list) and len(block) == 2 and block[0] == 1 else None
    if type(size) is not int or size < 1:
        raise CheckpointError(f"{path}: the block_size of {layer}.weight is {block!r}; it must be [1, group size]")
    return size


def _add(contents: Contents, layer: str, size: int, symmetric: bool, shape: tuple[int, int], path: Path) -> None:
    own_size = None if size >= shape[1] else size
    scheme = scheme_in_file(path, layer, 4, own_size, symmetric, float_zeros=not symmetric)
    contents.manifest.layers[layer] = scheme
    contents.shapes[layer] = shape


def _from_tiles(words: Tensor, N: int, K: int) -> Tensor:
    """The packed weight ``[N, packed_width(K)]`` from ``Int4TilePackedTo4dTensor``'s words.

    A thread of the 32 has a row of the tile and every fourth pair of columns. A word has the even columns of four
    pairs, then the odd ones.
    """
    tiles, steps, _, parts = words.shape

    def pack(rows: Tensor) -> Tensor:
        fields = unpack_nibbles(rows.contiguous().view(torch.uint8)) ^ 8
        split = fields.view(len(rows), steps, _TILE_ROWS, 4, parts, 2, 4).permute(0, 2, 1, 4, 6, 3, 5)
        return pack_codes(split.reshape(len(rows) * _TILE_ROWS, steps * parts * 32)[:, :K].contiguous())

    made = by_rows(lambda rows: pack(rows).view(len(rows), -1), words, _TILE_ROWS * K)
    return made.view(tiles * _TILE_ROWS, -1)[:N].contiguous()
