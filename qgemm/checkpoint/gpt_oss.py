"""The mxfp4 experts of GPT-OSS: ``quant_method`` ``mxfp4``.

``<experts>.gate_up_proj_blocks``: uint8 ``[E, 2 * I, H / 32, 16]``, two e2m1 codes per byte, low bits first.
``<experts>.gate_up_proj_scales``: uint8 ``[E, 2 * I, H / 32]``, where ``e`` stands for ``2^(e - 127)``. ``down_proj``
has the same, with ``[E, H, I / 32, 16]``; and both have biases. Rows of ``gate_up_proj`` are gate 0, up 0, gate 1, ...;
qgemm holds all gates before all ups, with the same values in its own packing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import StoredTensor, unfit
from qgemm.checkpoint.words import unpack_nibbles
from qgemm.nn.float_experts import gates_first
from qgemm.numerics.packing import pack_codes, packed_width
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "mxfp4"
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_GROUP = 32


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads every pair of ``..._blocks`` and ``..._scales``; raises ``CheckpointError`` unless they fit together."""
    contents = Contents.of_files(stored)
    contents.interleaves_experts = True
    for name, blocks in stored.items():
        weight = name.removesuffix(_BLOCKS)
        if weight == name:
            continue
        experts, _, leaf = weight.rpartition(".")
        if blocks.dtype != torch.uint8 or len(blocks.shape) != 4 or blocks.shape[3] != _GROUP // 2:
            raise unfit(blocks.path, name, blocks, f"torch.uint8, [E, N, K / {_GROUP}, {_GROUP // 2}]")
        scales = stored.get(f"{weight}{_SCALES}")
        if scales is None:
            raise CheckpointError(f"{blocks.path}: {experts} has {leaf}{_BLOCKS} and no {leaf}{_SCALES}")
        if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:3]:
            raise unfit(scales.path, f"{weight}{_SCALES}", scales, f"torch.uint8 {list(blocks.shape[:3])}")
        E, N, groups, _ = blocks.shape
        order = partial(gates_first, dim=1) if leaf == "gate_up_proj" else lambda value: value
        shape = (E, N, packed_width(groups * _GROUP))
        contents.convert(weight, name, shape, partial(_packed, order), torch.uint8)
        contents.convert(f"{weight}_scale", f"{weight}{_SCALES}", (E, N, groups), order, torch.uint8)
        bias = stored.get(f"{weight}{_BIAS}")
        if bias is not None:
            contents.convert(f"{weight}{_BIAS}", f"{weight}{_BIAS}", bias.shape, order, bias.dtype)
        contents.manifest.layers[experts] = resolve_scheme("mxfp4")
    return contents


def _packed(order: Callable[[Tensor], Tensor], blocks: Tensor) -> Tensor:
    """The blocks of each expert as qgemm packs them, one expert at a time."""
    E, N, groups, _ = blocks.shape
    packed = blocks.new_empty((E, N, packed_width(groups * _GROUP)))
    for expert in range(E):
        codes = unpack_nibbles(order(blocks[expert : expert + 1])[0].flatten(1))
        packed[expert] = pack_codes(codes)
    return packed
