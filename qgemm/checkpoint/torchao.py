"""Checkpoints of torchao in safetensors files: int8, fp8 and int4 weights, some with activations quantized at run time.

A weight is a tensor of one of torchao's classes. The file's metadata has its class and attributes, as JSON under its
name ``<module>.weight``, and the files contain its parts:

- ``<module>._weight_qdata``: int8 or float8_e4m3fn ``[N, K]``, also for ``IntxUnpackedToInt8Tensor`` with 4 bits;
- ``<module>._weight_scale``: ``[N, 1]``, or ``[1, 1]`` for the whole tensor; for int8 also ``[N, groups]``;
- ``<module>._weight_zero_point``: int8 of the same shape, for int8.

``torchao_int4.py`` has the classes of 4 bits with float zero points. AWQ adds ``<module>._weight_act_pre_scale``, by
which the input is multiplied.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint import torchao_int4
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.float_layers import check_scale, note_prescale
from qgemm.checkpoint.packed_layers import scheme_in_file
from qgemm.checkpoint.safetensors_file import StoredTensor, read_metadata, read_values, unfit
from qgemm.checkpoint.signs import note_scaled
from qgemm.checkpoint.tensors import BIAS_DTYPES, split_name
from qgemm.checkpoint.words import pack_int4
from qgemm.numerics.formats import FP8, INT8
from qgemm.numerics.packing import packed_width
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "torchao"
_INTX = "IntxUnpackedToInt8Tensor"
_FORMATS = {"Int8Tensor": INT8, "Float8Tensor": FP8, _INTX: INT8}
_QDATA, _ZERO_POINT, _PRESCALE = "_weight_qdata", "_weight_zero_point", "_weight_act_pre_scale"


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint whose files' metadata describe their tensors.

    Raises ``CheckpointError``, naming the layer, for classes that aren't read, and for activations that are quantized
    otherwise than row by row.
    """
    contents = Contents.of_files(stored)
    metadata = {path: read_metadata(path) for path in {tensor.path for tensor in stored.values()}}
    zero_points = {name: tensor for name, tensor in stored.items() if split_name(name)[1] == _ZERO_POINT}
    values = read_values(zero_points, torch.device("cpu"))
    symmetric = {name: not bool((value.float() != 0).any()) for name, value in values}
    for name, tensor in stored.items():
        layer, leaf = split_name(name)
        if leaf == _QDATA:
            about = _parse(metadata[tensor.path], layer, tensor.path)
            note = torchao_int4.NOTES.get(about["_type"], _note)
            note(contents, layer, about, symmetric.get(f"{layer}.{_ZERO_POINT}", True))
            if f"{layer}.{_PRESCALE}" in stored:
                note_prescale(contents, layer, _PRESCALE)
            if _dtype_name(about.get("activation_dtype")) not in (None, "bfloat16"):
                contents.note("activations stay in float, where the checkpoint asks for fp8")
        elif leaf.startswith("_") and leaf.endswith("_qdata"):
            raise CheckpointError(f"{tensor.path}: {name} is of a parameter that qgemm doesn't run quantized")
    return contents


def _parse(metadata: dict[str, str], layer: str, path: Path) -> dict[str, Any]:
    """The metadata about the weight of ``layer``, with its class as ``_type``."""
    try:
        about = json.loads(metadata.get(f"{layer}.weight", ""))
        kind, data = about["_type"], dict(about["_data"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its metadata don't say what {layer}.weight is") from error
    known = [*_FORMATS, *torchao_int4.NOTES]
    if not isinstance(kind, str) or kind not in known:
        raise unsupported(f"{path}: {layer}.weight is torchao's {kind!r}; qgemm reads {', '.join(known)}")
    return {**data, "_type": kind}


def _note(contents: Contents, layer: str, about: dict[str, Any], symmetric: bool) -> None:
    names = {leaf: f"{layer}._weight_{leaf}" for leaf in ("qdata", "scale")}
    weight = contents.stored[names["qdata"]]
    form, path = _FORMATS[about["_type"]], weight.path
    if weight.dtype != form.storage or len(weight.shape) != 2:
        raise unfit(path, names["qdata"], weight, f"{form.storage}, [N, K]")
    N, K = weight.shape
    bits, by_row = _bits(about, layer, path), _rounds_rows(contents, about, layer, path)
    shapes: set[tuple[int, ...]] = {(N, 1), (1, 1), (N,), (1,), ()}
    size = None
    if form is INT8 and not by_row and (size := _group_size(about, K)) is not None:
        shapes = {(N, K // size)}
    scale = check_scale(contents, names["scale"], BIAS_DTYPES, shapes)
    if form is FP8:
        scheme = resolve_scheme("fp8" if by_row else "fp8-weight")
    else:
        scheme = resolve_scheme("int8") if by_row else scheme_in_file(path, layer, bits, size, symmetric)
    contents.manifest.layers[layer] = scheme
    contents.shapes[layer] = N, K
    shape, dtype = ((N,), torch.float32) if by_row else ((N, 1 if size is None else K // size), scale.dtype)
    made = f"{layer}.weight", f"{layer}.weight_scale"

    def to_scale(value: Tensor) -> Tensor:
        return value.to(dtype).reshape(-1, shape[-1] if size else 1).expand(N, -1).reshape(shape).clone()

    if by_row:
        note_scaled(contents, (names["qdata"], names["scale"]), made, ((N, K), shape), to_scale)
    else:
        contents.convert(made[1], names["scale"], shape, to_scale, dtype)
        if bits == 4:
            contents.convert(made[0], names["qdata"], (N, packed_width(K)), pack_int4, torch.uint8)
        else:
            contents.convert(made[0], names["qdata"], weight.shape, lambda value: value, weight.dtype)
    _note_zero_point(contents, layer, None if by_row or scale.shape != shape else shape, symmetric)


def _note_zero_point(contents: Contents, layer: str, shape: tuple[int, ...] | None, symmetric: bool) -> None:
    """``shape``: that of the scales; None if the layer can't have zero points."""
    name = f"{layer}.{_ZERO_POINT}"
    zero_point = contents.stored.get(name)
    if zero_point is None:
        return
    if symmetric:
        contents.pass_over(name)  # already read
    elif zero_point.dtype != torch.int8 or zero_point.shape != shape:
        raise CheckpointError(
            f"{zero_point.path}: {name} is {zero_point}; qgemm reads zero points of whole numbers, with activations in "
            "float"
        )
    else:
        contents.convert(f"{layer}.weight_zero_point", name, zero_point.shape, lambda value: value, torch.int8)


def _bits(about: dict[str, Any], layer: str, path: Path) -> int:
    if about["_type"] != _INTX:
        return 8
    name = _dtype_name(about.get("target_dtype"))
    if name not in ("int4", "int8"):
        raise unsupported(f"{path}: {layer} has values of {name!r}; qgemm reads int4 and int8")
    return 4 if name == "int4" else 8


def _dtype_name(value: object) -> object:
    return value.get("_data") if isinstance(value, dict) else None


def _group_size(about: dict[str, Any], K: int) -> int | None:
    """How many columns share a scale, if that is only a part of a row according to the metadata."""
    block = about.get("block_size")
    size = block[1] if isinstance(block, list) and len(block) == 2 and block[0] == 1 else K
    return size if type(size) is int and 0 < size < K and K % size == 0 else None


def _rounds_rows(contents: Contents, about: dict[str, Any], layer: str, path: Path) -> bool:
    """Whether activations are quantized at run time, row by row. Raises ``CheckpointError`` for other ways."""
    rounding = about.get("activation_quantization") or about.get("apply_int8_act_asym_per_token_quant") or None
    if rounding in ("int8_asym_per_token", True):
        contents.note("activations stay in float, which the checkpoint has rounded to int8 with zero points")
    elif rounding is not None:
        raise unsupported(f"{path}: {layer} has the activation_quantization {rounding!r}, which qgemm doesn't know")
    kwargs = about.get("act_quant_kwargs")
    if kwargs is None:
        return False
    data = kwargs.get("_data") if isinstance(kwargs, dict) else None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: act_quant_kwargs of {layer}.weight are {kwargs!r}")
    granularity, mapping = data.get("granularity"), data.get("mapping_type")
    is_per_row = isinstance(granularity, dict) and granularity.get("_type") == "PerRow"
    is_symmetric = mapping is None or (isinstance(mapping, dict) and "ASYMMETRIC" not in str(mapping.get("_data")))
    bounds = [key for key in ("hp_value_lb", "hp_value_ub") if data.get(key) is not None]
    if not is_per_row or not is_symmetric or bounds:
        raise unsupported(
            f"{path}: {layer} quantizes activations otherwise than each row by its largest magnitude "
            f"({json.dumps(kwargs)[:200]}), which qgemm doesn't compute"
        )
    return True
