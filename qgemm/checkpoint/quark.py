"""Checkpoints of AMD's Quark (``export_safetensors``): int4, int8, fp8, mxfp4 and nvfp4, and some of each.

| a layer ``[N, K]`` | ``weight`` | ``weight_scale`` | ``weight_zero_point`` |
|---|---|---|---|
| int8 or uint8 by row | ``[N, K]`` | ``[N]`` or ``[]`` | the same, of the weight's dtype |
| int8 or uint8 in groups | ``[K, N]`` | ``[groups, N]`` | the same, of the weight's dtype |
| int4 or uint4 by row | int32 ``[N, K / 8]`` | ``[N]`` or ``[]`` | int32 ``[N / 8]`` or ``[]`` |
| int4 or uint4 in groups | int32 ``[K, N / 8]`` | ``[groups, N]`` | int32 ``[groups, N / 8]`` |
| int4 of fp8 | int32 ``[N, K / 8]`` | ``[]``, and ``weight_scale_2`` ``[N]``: their product | |
| fp8 | e4m3 ``[N, K]`` | ``[N]``, ``[]`` or one for each block of 128 x 128 | |
| mxfp4, nvfp4 | as ModelOpt's | | |

A static activation has an ``input_scale`` and, in whole numbers, an ``input_zero_point``. ``weight_zero_point`` is 0 in
symmetric layers. A word of int4 has eight neighbors, in the order 0 2 4 6 1 3 5 7 with ``pack_method`` ``reorder``.

The config tells what a layer is (``quark_config.py``). Layers whose inputs would have to be rotated or multiplied are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint import quark_config
from qgemm.checkpoint.cache_scales import leave_to_cache
from qgemm.checkpoint.contents import Contents, Made
from qgemm.checkpoint.errors import unsupported
from qgemm.checkpoint.float_layers import (
    check_scale,
    for_each,
    matrix,
    note_float_scale,
    note_fp8,
    note_input_scale,
    note_mxfp4,
    note_nvfp4,
)
from qgemm.checkpoint.integer_layers import note_int8, note_shifted
from qgemm.checkpoint.quark_config import Step, Unsupported
from qgemm.checkpoint.safetensors_file import StoredTensor, unfit
from qgemm.checkpoint.tensors import BIAS_DTYPES, FLOAT_DTYPES, split_name
from qgemm.checkpoint.words import by_rows, unpack_words
from qgemm.numerics.formats import INT8
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import pack_codes, packed_width
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "quark"
_READS = "of Quark, qgemm reads int4, int8, fp8 (e4m3, by row or in blocks of 128 x 128), mxfp4 and nvfp4"
_SCALES = ("weight_scale", "weight_scale_inv")  # the latter of layers that were fp8 before Quark
_OF_INPUTS = ("input_scale", "input_zero_point", "input_scale_2")
# Of layers whose input isn't multiplied by the weight alone, or as it is; and which algorithms make them.
_TRANSFORMS = ("input_rotation", "input_prescale", "smooth_factor")
_ALGORITHMS = {"rotation": ("r4", "online_r1_rotation"), "quarot": ("r4", "online_r1_rotation"), "svdquant": ("name",)}
_ASYMMETRIC = "the zero point is not 0, but the config says that the layer is quantized symmetrically"
_SHIFTED = "the zero point of the input is not 0, but the config says that it is quantized symmetrically"
_WORD = 8  # values of 4 bits
_GATES_AND_UPS = re.compile(r".*\.experts\.\d+\.gate_up_proj")


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint of Quark's from its config and stored tensors.

    Raises ``CheckpointError``, naming the layer, for anything that qgemm can't compute.
    """
    export = quantization.get("export")
    export = export if isinstance(export, dict) else {}
    written_as = export.get("weight_format", "real_quantized")
    if written_as != "real_quantized":
        raise unsupported(f"{config_path}: weight_format is {written_as!r}, of weights in float")
    packed = export.get("pack_method", quantization.get("pack_method", "reorder"))
    if packed not in ("reorder", "order"):
        raise unsupported(f"{config_path}: pack_method is {packed!r}; qgemm reads 'reorder' and 'order'")
    _refuse_transforms(quantization, stored, config_path)
    contents = Contents.of_files(stored)
    for name in stored:
        layer, leaf = split_name(name)
        if leaf in _SCALES:
            try:
                _note_layer(contents, layer, leaf, quantization, packed == "order")
            except Unsupported as problem:
                raise unsupported(f"{config_path}: {layer} {problem}; {_READS}") from None
    _split_gates(contents)
    leave_to_cache(contents, {**quantization, **export})
    _leave_outputs(contents, quantization)
    return contents


def _refuse_transforms(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> None:
    """Raises ``CheckpointError`` if layers have inputs that are transformed, or biases that are quantized."""
    for name in stored:
        layer, leaf = split_name(name)
        if leaf in _TRANSFORMS:
            raise unsupported(f"{config_path}: {layer} has an {leaf}, by which its input would have to be multiplied")
        if leaf == "bias_scale":
            raise unsupported(f"{config_path}: {layer} has a quantized bias, which qgemm doesn't read")
    algorithms = quantization.get("algo_config")
    for one in algorithms if isinstance(algorithms, list) else [algorithms]:
        asked = one if isinstance(one, dict) else {}
        algorithm = str(asked.get("name"))
        if (key := next((key for key in _ALGORITHMS.get(algorithm, ()) if asked.get(key)), None)) is not None:
            what = algorithm if key == "name" else f"{algorithm} with {key}"
            raise unsupported(f"{config_path}: algo_config has {what}, which transforms inputs as the model runs")


def _note_layer(contents: Contents, layer: str, leaf: str, quantization: dict[str, Any], in_order: bool) -> None:
    found = quark_config.describe(quark_config.config_of(layer, quantization))
    scheme = resolve_scheme(found.scheme)
    if found.stored_as == "mxfp4":
        note_mxfp4(contents, layer, "weight")
    elif found.stored_as == "nvfp4":
        note_nvfp4(contents, layer, "weight", "weight_scale_2", divides=False)
    elif found.stored_as == "fp8":
        note_fp8(contents, layer, scheme, leaf)
    else:
        _note_integers(contents, layer, found, in_order)
    contents.manifest.layers[layer] = scheme
    if scheme.is_static and not scheme.has_zero_point:
        note_input_scale(contents, layer)
        if f"{layer}.input_zero_point" in contents.headers:
            contents.must_be_zero(f"{layer}.input_zero_point", _SHIFTED)
    elif not scheme.is_static:
        for each in _OF_INPUTS:
            if found.note and f"{layer}.{each}" in contents.headers:
                contents.pass_over(f"{layer}.{each}")
    if found.note:
        contents.note(found.note)


def _note_integers(contents: Contents, layer: str, found: quark_config.Layer, in_order: bool) -> None:
    scheme, step = resolve_scheme(found.scheme), found.weight
    if scheme.activation is not None and scheme.weight.dtype == "int8":
        if scheme.has_zero_point:
            zero_point = contents.stored.get(f"{layer}.input_zero_point")
            wanted = torch.uint8 if found.unsigned_inputs else INT8.storage
            if zero_point is None or zero_point.dtype != wanted or zero_point.shape not in ((), (1,)):
                raise unfit(contents.path_of(layer), f"{layer}.input_zero_point", zero_point, f"{wanted}, []")
            note_shifted(contents, layer)
        else:
            note_int8(contents, layer)
        _check_zeros(contents, f"{layer}.weight_zero_point")
        return
    N, K = _note_values(contents, layer, step, in_order)
    if found.stored_as == "twice":
        _note_both_scales(contents, layer, N)
    elif step.is_by_group:
        name, shape = f"{layer}.weight_scale", (N, K // (step.group_size or K))
        scale = check_scale(contents, name, BIAS_DTYPES, {shape[::-1]})
        contents.convert(name, name, shape, lambda value: value.t().contiguous(), scale.dtype)
    else:
        check_scale(contents, f"{layer}.weight_scale", FLOAT_DTYPES, {(), (1,), (N,), (N, 1)})
        note_float_scale(contents, layer, N)
    if not step.is_asymmetric:
        for leaf in ("weight_zero_point", "weight_zero_point_2"):
            _check_zeros(contents, f"{layer}.{leaf}")
    else:
        _note_zero_point(contents, layer, step, (N, K), in_order)


def _note_values(contents: Contents, layer: str, step: Step, in_order: bool) -> tuple[int, int]:
    """Notes the conversion of a weight in whole numbers; returns its ``[N, K]``."""
    name, unsigned = f"{layer}.weight", step.dtype in quark_config.UNSIGNED
    if step.dtype.endswith("8"):
        stored = matrix(contents, layer, "weight", torch.uint8 if unsigned else INT8.storage)
        N, K = stored.shape[::-1] if step.is_by_group else stored.shape
        _check_groups(stored, name, step, K)

        def to_rows(value: Tensor) -> Tensor:
            return _signed8(value.t().contiguous() if step.is_by_group else value)

        contents.convert(name, name, (N, K), to_rows, INT8.storage)
        contents.shapes[layer] = N, K
        return N, K
    words = matrix(contents, layer, "weight", torch.int32)
    if step.is_by_group:
        # The number of scales tells N, of which the last word may have fewer values.
        scale = contents.stored.get(f"{layer}.weight_scale")
        K, N = words.shape[0], scale.shape[-1] if scale is not None and scale.shape else 0
        _check_groups(words, name, step, K)
        if words.shape[1] != cdiv(N, _WORD):
            raise unfit(words.path, name, words, f"torch.int32, [K, {cdiv(N, _WORD)}], as weight_scale is {scale}")
    else:
        N, K = words.shape[0], words.shape[1] * _WORD
    pack = partial(_pack_groups if step.is_by_group else _pack_rows, in_order=in_order, flip=8 if unsigned else 0)
    contents.convert(name, name, (N, packed_width(K)), lambda value: pack(value, N=N, K=K), torch.uint8)
    contents.shapes[layer] = N, K
    return N, K


def _check_groups(stored: StoredTensor, name: str, step: Step, K: int) -> None:
    if step.is_by_group and K % (step.group_size or 1):
        raise unfit(stored.path, name, stored, f"[K, ...], in groups of {step.group_size}")


def _note_both_scales(contents: Contents, layer: str, N: int) -> None:
    """The values are int4 of fp8: both scales multiply them."""
    names = [f"{layer}.weight_scale", f"{layer}.weight_scale_2"]
    check_scale(contents, names[0], FLOAT_DTYPES, {(), (1,)})
    check_scale(contents, names[1], FLOAT_DTYPES, {(N,), (N, 1)})

    def multiply(first: Tensor, second: Tensor) -> Sequence[Tensor]:
        return ((second.float() * first.float().reshape(())).reshape(N, 1),)

    contents.convert_together(names, {names[0]: (names[1], (N, 1), torch.float32)}, multiply)


def _note_zero_point(contents: Contents, layer: str, step: Step, shape: tuple[int, int], in_order: bool) -> None:
    """Zero points in the weight's own dtype, packed as it is."""
    (N, K), name, unsigned = shape, f"{layer}.weight_zero_point", step.dtype in quark_config.UNSIGNED
    is_packed = step.dtype.endswith("4")
    dtype = torch.int32 if is_packed else torch.uint8 if unsigned else INT8.storage
    along = cdiv(N, _WORD) if is_packed else N
    groups = K // (step.group_size or K) if step.is_by_group else 1
    shapes: set[tuple[int, ...]] = {(groups, along)} if step.is_by_group else {(), (along,)}
    check_scale(contents, name, (dtype,), shapes)

    def to_rows(value: Tensor) -> Tensor:
        if not is_packed:
            zeros = _signed8(value)
        else:
            fields = value.reshape(1, 1) & 15 if value.ndim == 0 else _columns(value.reshape(groups, -1), in_order)
            zeros = (fields.to(torch.uint8) ^ (0 if unsigned else 8)).view(INT8.storage) - 8
        return zeros[:, :N].t().contiguous() if step.is_by_group else for_each(zeros.flatten()[:N], N)[:, None]

    contents.convert(name, name, (N, groups), to_rows, INT8.storage)


def _check_zeros(contents: Contents, name: str) -> None:
    if name in contents.headers:
        contents.must_be_zero(name, _ASYMMETRIC)


def _signed8(value: Tensor) -> Tensor:
    """int8 ``q - 128`` from uint8 ``q``; int8 as it is."""
    return (value ^ 128).view(INT8.storage) if value.dtype == torch.uint8 else value


def _columns(words: Tensor, in_order: bool) -> Tensor:
    """uint8 ``[n, 8 * w]``, 0 to 15, from int32 ``[n, w]``."""
    fields = unpack_words(words, 4, words.shape[1] * _WORD)
    # The first four fields are columns 0, 2, 4 and 6, the others 1, 3, 5 and 7.
    return fields if in_order else fields.view(len(words), -1, 2, 4).transpose(2, 3).reshape(fields.shape)


def _pack_rows(words: Tensor, N: int, K: int, in_order: bool, flip: int) -> Tensor:
    return by_rows(lambda some: pack_codes(_columns(some, in_order) ^ flip), words, K)


def _pack_groups(words: Tensor, N: int, K: int, in_order: bool, flip: int) -> Tensor:
    """From words of eight rows for one column each, ``[K, N / 8]``."""

    def pack(some: Tensor) -> Tensor:
        rows = unpack_words(some, 4, K * _WORD).view(-1, K, _WORD).transpose(1, 2)
        if not in_order:
            rows = rows.reshape(-1, 2, 4, K).transpose(1, 2)
        return pack_codes(rows.reshape(-1, K) ^ flip).view(len(some), -1)

    made = by_rows(pack, words.t().contiguous(), K * _WORD)
    return made.view(made.shape[0] * _WORD, packed_width(K))[:N].contiguous()


def _split_gates(contents: Contents) -> None:
    """Divides the ``gate_up_proj`` of single experts of GPT-OSS, whose rows are gate 0, up 0, gate 1, ..., into two."""
    layers, names = contents.manifest.layers, dict[str, list[str]]()
    for name in contents.headers:
        layer, _ = split_name(name)
        if layer in layers and _GATES_AND_UPS.fullmatch(layer):
            names.setdefault(layer, []).append(name)
    for layer, own in names.items():
        headers, scheme = {name: contents.headers[name] for name in own}, layers.pop(layer)
        rows = headers[f"{layer}.weight"].shape[0]
        if rows % 2:
            raise unfit(
                headers[own[0]].path, f"{layer}.weight", headers[f"{layer}.weight"], "of an even number of rows"
            )
        parts = [layer.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
        made: dict[str, Made] = {}
        for part in parts:
            for name, tensor in headers.items():
                shape = (rows // 2, *tensor.shape[1:]) if tensor.shape[:1] == (rows,) else tensor.shape
                made[f"{part}.{split_name(name)[1]}"] = name, shape, tensor.dtype
            layers[part] = scheme
            if layer in contents.shapes:
                contents.shapes[part] = rows // 2, contents.shapes[layer][1]
        contents.shapes.pop(layer, None)
        contents.convert_further(made, own, partial(_every_other_row, own, rows))


def _every_other_row(names: list[str], rows: int, found: Mapping[str, Tensor]) -> list[Tensor]:
    values = [found[name] for name in names]
    return [(each[first::2] if each.shape[:1] == (rows,) else each).clone() for first in (0, 1) for each in values]


def _leave_outputs(contents: Contents, quantization: dict[str, Any]) -> None:
    """Leaves the scales of layers' outputs, and of attention's probabilities, out of ``contents``, with a note."""
    outputs = [name for name in contents.headers if split_name(name)[1] in ("output_scale", "output_zero_point")]
    for name in outputs:
        contents.pass_over(name)
    if outputs:
        contents.note(f"outputs of layers, such as {split_name(outputs[0])[0]}, are not quantized (output_tensors)")
    if quantization.get("softmax_quant_spec"):
        contents.note("attention's probabilities are not quantized (softmax_quant_spec)")
