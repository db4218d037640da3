"""``recognize``: a checkpoint's format according to its tensors, for a config that says nothing about quantization.

Names, dtypes and shapes identify most formats. For some they also show everything that a reader needs; for others, only
the config tells the rest, such as whether activations are quantized: these can be named, but not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qgemm.checkpoint import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors_groups,
    eetq,
    fp8,
    gpt_oss,
    gptq,
    hqq,
    mlx,
    modelopt,
    quanto,
    quark,
    torchao,
)
from qgemm.checkpoint.bitsandbytes_4bit import STATE
from qgemm.checkpoint.manifest import QUANT_METHOD
from qgemm.checkpoint.packed_layers import layout_in
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import split_name
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FP8_DTYPES, INT8
from qgemm.numerics.integers import cdiv

_ACTIVATIONS = "whether activations are quantized, and how"
_OTHER_BLOCKS = (32, 64, 256, 512)


@dataclass(frozen=True)
class Recognized:
    """What tensors show about their format.

    - ``format``: its ``quant_method``. ``variant``: a more detailed description.
    - ``quantization``: a ``quantization_config`` that says no more than the tensors do.
    - ``unsaid``: what a reader must know but the tensors don't show; empty if they show everything.
    """

    format: str
    variant: str = ""
    quantization: dict[str, Any] = field(default_factory=dict)
    unsaid: str = ""


# For formats that tensors show: other methods, besides the one of that name, whose tensors may look the same.
_ALIKE: dict[str, tuple[str, ...]] = {
    fp8.QUANT_METHOD: (fp8.FBGEMM, modelopt.QUANT_METHOD, compressed_tensors_groups.QUANT_METHOD),
    QUANT_METHOD: (compressed_tensors_groups.QUANT_METHOD, modelopt.QUANT_METHOD),
    quark.QUANT_METHOD: (compressed_tensors_groups.QUANT_METHOD, modelopt.QUANT_METHOD),
}


def contradicts(method: str, found: Recognized) -> bool:
    """Whether tensors recognized as ``found`` can't belong to the ``method`` in their ``quantization_config``."""
    if method in (auto_round.QUANT_METHOD, auto_round.OLD_METHOD):
        # It also has other layouts, for data types that its own config names.
        return found.format not in (gptq.QUANT_METHOD, awq.QUANT_METHOD, fp8.QUANT_METHOD) and not found.unsaid
    if method == quark.QUANT_METHOD:
        # Its nvfp4 has ModelOpt's tensors.
        return found.format not in (quark.QUANT_METHOD, modelopt.QUANT_METHOD) and not found.unsaid
    may_look_so = bool(found.unsaid) and method in _ALIKE.get(found.format, ())
    return found.format != method and not may_look_so


def recognize(stored: Mapping[str, StoredTensor]) -> Recognized | None:
    """The format of ``stored``, the tensors in files; None if they are in float, or in no known format."""
    leaves = {split_name(name)[1] for name in stored}
    if eetq.SCALES in leaves:
        return Recognized(eetq.QUANT_METHOD)
    if "qweight" in leaves:
        # GPTQ's version shows in the values of zero points. AutoRound uses either layout.
        return Recognized(awq.QUANT_METHOD if layout_in(stored) == "awq" else gptq.QUANT_METHOD)
    if mlx.METAL_BIASES in leaves:
        return Recognized(mlx.METAL)
    if "scales" in leaves and any(_is_of_mlx(name, stored) for name in stored):
        return Recognized(mlx.QUANT_METHOD)
    if any(name.endswith((f".{quanto.WHOLE}", f".{quanto.PACKED}")) for name in stored):
        return Recognized(quanto.QUANT_METHOD)
    if "weight_packed" in leaves:
        return Recognized(compressed_tensors_groups.QUANT_METHOD, "packed", unsaid=_ACTIVATIONS)
    if "_weight_qdata" in leaves:
        return Recognized(torchao.QUANT_METHOD)
    if hqq.WEIGHT in leaves:
        return Recognized(hqq.QUANT_METHOD)
    if "SCB" in leaves:
        return Recognized(bitsandbytes.QUANT_METHOD, "int8")
    if any(STATE in name for name in stored):
        return Recognized(bitsandbytes.QUANT_METHOD, "4 bits")
    if any(name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in stored for name in stored):
        return Recognized(gpt_oss.QUANT_METHOD)
    if "weight_scale_2" in leaves:
        return Recognized(modelopt.QUANT_METHOD)
    if any(_is_of_quark(name, stored) for name in stored):
        return Recognized(quark.QUANT_METHOD, unsaid="whether values are signed, and in which order they are packed")
    dtypes = {tensor.dtype for tensor in stored.values()}
    if dtypes & set(FP8_DTYPES):
        return _fp8(stored, leaves)
    if INT8.storage in dtypes and "weight_scale" in leaves:
        is_flat = all(len(tensor.shape) < 2 for name, tensor in stored.items() if name.endswith(".weight_scale"))
        if is_flat:
            zeros = (tensor for name, tensor in stored.items() if name.endswith(".weight_zero_point"))
            if any(len(tensor.shape) < 2 for tensor in zeros):
                return Recognized(quark.QUANT_METHOD, unsaid=_ACTIVATIONS)
            return Recognized(QUANT_METHOD, unsaid="the scheme of each layer")
        return Recognized(compressed_tensors_groups.QUANT_METHOD, compressed_tensors_groups.INT, unsaid=_ACTIVATIONS)
    return None


def _is_of_mlx(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    layer, leaf = split_name(name)
    # A dtype that no other format uses. No config names this one.
    return leaf == "weight" and stored[name].dtype == mlx.WORD and f"{layer}.scales" in stored


def _is_of_quark(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    layer, leaf = split_name(name)
    return leaf == "weight" and stored[name].dtype == torch.int32 and f"{layer}.weight_scale" in stored


def _fp8(stored: Mapping[str, StoredTensor], leaves: set[str]) -> Recognized:
    """For fp8, only the name ``..._scale_inv`` identifies a library, which always quantizes activations."""
    grids = {name: tensor for name, tensor in stored.items() if name.endswith("_scale_inv")}
    if not grids or "weight_scale" in leaves:
        return Recognized(fp8.QUANT_METHOD, unsaid=_ACTIVATIONS)
    pairs: dict[int, list[tuple[int, int]]] = {-2: [], -1: []}  # by axis: its length, and its number of blocks
    for name, grid in grids.items():
        weight = stored.get(name.removesuffix("_scale_inv"))
        if weight is not None and 2 <= len(weight.shape) == len(grid.shape):
            for axis, of_axis in pairs.items():
                of_axis.append((weight.shape[axis], grid.shape[axis]))
    has_blocks = bool(pairs[-1])
    quantization = {
        "activation_scheme": "static" if "activation_scale" in leaves else "dynamic",
        "weight_block_size": [BLOCK, BLOCK] if has_blocks else None,
    }
    is_settled = not has_blocks or not any(
        all(cdiv(size, block) == count for size, count in of_axis)
        for of_axis in pairs.values()
        for block in _OTHER_BLOCKS
    )
    variant = "blocks" if has_blocks else ""
    return Recognized(fp8.QUANT_METHOD, variant, quantization, "" if is_settled else "how large its blocks are")
