"""Checkpoints of torchao in safetensors files: int8 and fp8 weights, alone or with activations quantized as they come.

A weight is a tensor of a class of torchao's. The file's metadata has its class and attributes, in JSON under its name
``<module>.weight``, and the files hold its parts:

- ``<module>._weight_qdata``: int8 or float8_e4m3fn ``[N, K]``;
- ``<module>._weight_scale``: ``[N, 1]``, or ``[1, 1]`` for the whole tensor;
- ``<module>._weight_zero_point``: int8, with ``Int8Tensor``.

Its 4-bit weights aren't read: ``Int4Tensor`` has float zero points, and others are laid out for one kernel.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.safetensors_file import StoredTensor, read_metadata, unfit
from qgemm.checkpoint.tensors import BIAS_DTYPES, split_name
from qgemm.numerics.formats import FP8, INT8
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "torchao"
_FORMATS = {"Int8Tensor": INT8, "Float8Tensor": FP8}
_QDATA = "_weight_qdata"
_ASYMMETRIC = "the zero point is not 0: torchao has quantized the layer asymmetrically, which qgemm doesn't read"


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """The contents of a checkpoint whose files' metadata say what their tensors are.

    Raises ``CheckpointError``, naming the layer, for classes other than ``Int8Tensor`` and ``Float8Tensor``, and for
    scales finer than a row.
    """
    contents = Contents(Manifest({}, {}), stored, dict(stored), is_foreign=True)
    metadata = {path: read_metadata(path) for path in {tensor.path for tensor in stored.values()}}
    for name, tensor in stored.items():
        layer, leaf = split_name(name)
        if leaf == _QDATA:
            _note(contents, layer, _parse(metadata[tensor.path], layer, tensor.path))
        elif leaf.startswith("_") and leaf.endswith("_qdata"):
            raise CheckpointError(f"{tensor.path}: {name} is of a parameter that qgemm doesn't run quantized")
    return contents


def _parse(metadata: dict[str, str], layer: str, path: Path) -> dict[str, Any]:
    """What the metadata say of the weight of ``layer``, with its class as ``_type``."""
    try:
        about = json.loads(metadata.get(f"{layer}.weight", ""))
        kind, data = about["_type"], dict(about["_data"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its metadata don't say what {layer}.weight is") from error
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise CheckpointError(f"{path}: {layer}.weight is torchao's {kind!r}; qgemm reads {' and '.join(_FORMATS)}")
    return {**data, "_type": kind}


def _note(contents: Contents, layer: str, about: dict[str, Any]) -> None:
    stored = contents.stored
    names = {leaf: f"{layer}._weight_{leaf}" for leaf in ("qdata", "scale", "zero_point", "act_pre_scale")}
    weight, scale = stored[names["qdata"]], stored.get(names["scale"])
    form = _FORMATS[about["_type"]]
    if weight.dtype != form.storage or len(weight.shape) != 2:
        raise unfit(weight.path, names["qdata"], weight, f"{form.storage}, [N, K]")
    N = weight.shape[0]
    if scale is None or scale.dtype not in BIAS_DTYPES or scale.shape not in ((N, 1), (1, 1), (N,), (1,), ()):
        raise unfit(weight.path, names["scale"], scale, f"of a float dtype, [{N}, 1] or [1, 1]")
    if names["act_pre_scale"] in stored:
        raise CheckpointError(
            f"{weight.path}: {names['act_pre_scale']} is of AWQ or SmoothQuant, which qgemm doesn't read"
        )
    dtype, by_row = scale.dtype, _rounds_rows(about, layer, weight.path)
    if by_row:
        contents.manifest.layers[layer] = resolve_scheme(form.name)
        made: tuple[int, ...] = (N,)
        dtype = torch.float32
    else:
        contents.manifest.layers[layer] = resolve_scheme(f"{form.name}-weight")
        made = (N, 1)
    assert dtype is not None
    contents.convert(f"{layer}.weight", names["qdata"], weight.shape, lambda value: value, weight.dtype)

    def for_each_row(value: Tensor) -> Tensor:
        return value.to(dtype).reshape(-1).expand(N).reshape(made).clone()

    contents.convert(f"{layer}.weight_scale", names["scale"], made, for_each_row, dtype)
    if names["zero_point"] in stored:
        contents.must_be_zero(names["zero_point"], _ASYMMETRIC)


def _rounds_rows(about: dict[str, Any], layer: str, path: Path) -> bool:
    """Whether activations are quantized, each row as it comes. Raises ``CheckpointError`` for another way."""
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
        raise CheckpointError(
            f"{path}: {layer} quantizes activations otherwise than each row by its largest magnitude "
            f"({json.dumps(kwargs)[:200]}), which qgemm doesn't compute"
        )
    return True
