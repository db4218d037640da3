"""Checkpoints of optimum-quanto in safetensors files: weights of 2, 4 and 8 bits, and fp8.

| a layer ``[N, K]`` | tensors |
|---|---|
| qint8, qfloat8 | ``weight._data`` int8 or e4m3 ``[N, K]``, ``weight._scale`` ``[N, 1]``: ``W = q * scale`` |
| qint4, qint2 | ``weight._data._data`` uint8 ``[ceil(G * bits / 8), size]``: two or four parts of the ``G`` groups of |
| | all rows, the first in the lowest bits; ``weight._scale`` and ``weight._shift`` ``[G, 1]``: |
| | ``W = q * scale - shift`` with a float shift, ``W = (q - shift) * scale`` with one in uint8 |

Each layer also has an ``input_scale`` and an ``output_scale``, 1 unless activations are quantized. Its own library
tells what is quantized in ``quanto_qmap.json``, beside a config that says nothing. Nothing tells into how many rows the
groups of qint4 and qint2 are divided: that is the model's, so these layers are ``[G, size]`` until ``ungroup``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.float_layers import check_scale, for_each
from qgemm.checkpoint.layout import place_of
from qgemm.checkpoint.packed_layers import integers_scheme, scheme_in_file
from qgemm.checkpoint.safetensors_file import StoredTensor, unfit
from qgemm.checkpoint.tensors import BIAS_DTYPES, find_module, split_name
from qgemm.checkpoint.words import by_rows
from qgemm.nn.linear_layer import is_float_linear, linear_weight
from qgemm.numerics.formats import FP8, INT8
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import pack_codes, packed_width, unpack_codes
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "quanto"
CONFIG_FILE = "quanto_qmap.json"
MAP = "quanto_qmap"
"""Where ``quantization_config`` has the content of that file."""

WHOLE, PACKED = "weight._data", "weight._data._data"
_SCHEMES = {INT8.storage: "int8-weight", FP8.storage: "fp8-weight"}
_BITS = {"qint4": 4, "qint2": 2}
_LEAVES = ("weight", "weight_scale", "weight_zero_point")


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint whose tensors say themselves what each layer is.

    Raises ``CheckpointError``, naming the layer, for other dtypes.
    """
    contents = Contents.of_files(stored)
    said = quantization.get(MAP)
    said = said if isinstance(said, dict) else {}
    for name in stored:
        if name.endswith(f".{PACKED}"):
            layer = name.removesuffix(f".{PACKED}")
            own = said.get(layer)
            _note_packed(contents, layer, own.get("weights") if isinstance(own, dict) else None)
        elif name.endswith(f".{WHOLE}"):
            _note_whole(contents, name.removesuffix(f".{WHOLE}"))
        elif split_name(name)[1] in ("input_scale", "output_scale") and stored[name].shape in ((), (1,)):
            contents.pass_over(name)
    kinds = [own.get("activations") for own in said.values() if isinstance(own, dict)]
    asked = next((kind for kind in (quantization.get("activations"), *kinds) if kind not in (None, "none")), None)
    if asked is not None:
        contents.note(f"activations stay in float, where the checkpoint asks for {asked}")
    return contents


def _note_whole(contents: Contents, layer: str) -> None:
    name, scale = f"{layer}.{WHOLE}", f"{layer}.weight._scale"
    weight = contents.stored[name]
    if weight.dtype not in _SCHEMES or len(weight.shape) != 2:
        raise unsupported(f"{weight.path}: {name} is {weight}; of quanto, qgemm reads int8 and e4m3, [N, K]")
    N, K = weight.shape
    dtype = check_scale(contents, scale, BIAS_DTYPES, {(), (1,), (N, 1)}).dtype
    contents.convert(f"{layer}.weight", name, (N, K), lambda value: value, weight.dtype)
    contents.convert(f"{layer}.weight_scale", scale, (N, 1), lambda value: for_each(value, N)[:, None], dtype)
    contents.manifest.layers[layer] = resolve_scheme(_SCHEMES[weight.dtype])
    contents.shapes[layer] = N, K


def _note_packed(contents: Contents, layer: str, kind: object) -> None:
    names = [f"{layer}.{leaf}" for leaf in (PACKED, "weight._scale", "weight._shift")]
    weight, scale, shift = (contents.stored.get(name) for name in names)
    assert weight is not None
    if weight.dtype != torch.uint8 or len(weight.shape) != 2:
        raise unfit(weight.path, names[0], weight, "torch.uint8, [packed groups, group size]")
    if scale is None or scale.dtype not in BIAS_DTYPES or scale.shape[1:] != (1,):
        raise unfit(weight.path, names[1], scale, "of a float dtype, [groups, 1]")
    if shift is None or shift.dtype not in (*BIAS_DTYPES, torch.uint8) or shift.shape != scale.shape:
        raise unfit(weight.path, names[2], shift, f"of a float dtype or torch.uint8, {list(scale.shape)}")
    (rows, size), G = weight.shape, scale.shape[0]
    fitting = [bits for bits in (4, 2) if rows == cdiv(G * bits, 8)]
    bits = _BITS.get(str(kind), fitting[0] if len(fitting) == 1 else None)
    if bits not in fitting:
        raise unfit(weight.path, names[0], weight, f"{G} groups of 2 or 4 bits, as {CONFIG_FILE} says")
    has_floats = shift.dtype != torch.uint8
    zero_points = torch.float32 if has_floats else INT8.storage
    made = {
        f"{layer}.weight": (names[0], (G, packed_width(size)), torch.uint8),
        f"{layer}.weight_scale": (names[1], (G, 1), scale.dtype),
        f"{layer}.weight_zero_point": (names[2], (G, 1), zero_points),
    }
    contents.convert_together(names, made, partial(_unpack, bits=bits))
    contents.manifest.layers[layer] = integers_scheme(4, None, symmetric=False, float_zeros=has_floats)
    contents.shapes[layer] = G, size
    contents.grouped.add(layer)


def _unpack(packed: Tensor, scale: Tensor, shift: Tensor, bits: int) -> Sequence[Tensor]:
    """The parameters of a layer ``[G, size]``. Of 4 bits, 8 is subtracted; those of 2 are stored as they are."""
    middle, size, mask = (8 if bits == 4 else 0), packed.shape[1], (1 << bits) - 1
    parts = [(packed >> bits * part) & mask for part in range(8 // bits)]
    codes = torch.cat(parts)[: len(scale)] ^ middle
    if shift.dtype == torch.uint8:
        if bool((shift > mask).any()):
            raise ValueError(f"shifts go up to {int(shift.max())}; those of {bits} bits go up to {mask}")
        zero_point = shift.view(INT8.storage) - middle
    else:
        zero_point = middle * scale.float() - shift.float()
    return by_rows(pack_codes, codes, size), scale, zero_point


def ungroup(contents: Contents, model: nn.Module, config_path: Path) -> None:
    """Divides the groups of ``contents.grouped`` into the rows that these layers have in ``model``.

    Raises ``CheckpointError`` for a layer of another size.
    """
    for layer in contents.grouped:
        module = find_module(model, layer)
        if not is_float_linear(module):
            continue  # which is refused where all such layers are
        (G, size), (N, K) = contents.shapes[layer], linear_weight(module).shape
        if G * size != N * K or K % size:
            has = f"layer {layer} has {G} groups of {size} columns"
            raise CheckpointError(f"{place_of(config_path)}: {has}; the model's shape is {[N, K]}")
        float_zeros, groups = contents.manifest.layers[layer].weight.float_zeros, K // size
        own_size, path = (size if groups > 1 else None), place_of(config_path)
        scheme = scheme_in_file(path, layer, 4, own_size, symmetric=False, float_zeros=float_zeros)
        names = [f"{layer}.{leaf}" for leaf in _LEAVES]
        shapes = {names[0]: (N, packed_width(K)), names[1]: (N, groups), names[2]: (N, groups)}
        made = {name: (name, shapes[name], contents.headers[name].dtype) for name in names}
        contents.convert_further(made, names, partial(_into_rows, names, (N, K), size))
        contents.manifest.layers[layer], contents.shapes[layer] = scheme, (N, K)
    contents.grouped.clear()


def _into_rows(
    names: Sequence[str], shape: tuple[int, int], size: int, found: Mapping[str, Tensor]
) -> Sequence[Tensor]:
    (N, K), (weight, *factors) = shape, (found[name] for name in names)
    rows = by_rows(lambda some: unpack_codes(some, size), weight, size).reshape(N, K)
    return by_rows(pack_codes, rows, K), *(factor.reshape(N, K // size) for factor in factors)
