"""One layer in files of compressed-tensors: which of the config's groups it belongs to, and its conversion.

| stored as | tensors of a layer ``[N, K]`` |
|---|---|
| pack-quantized | ``weight_packed`` int32, along K, ``q + 2^(bits - 1)``; ``weight_scale`` ``[N, groups]``; |
| | ``weight_shape``; perhaps ``weight_zero_point`` int32, along N, and ``weight_g_idx``, each column's group |
| int-quantized, naive-quantized | ``weight`` int8, also of 4 bits; ``weight_scale``; ``weight_zero_point`` int8 |
| float-quantized, naive-quantized | ``weight`` e4m3; ``weight_scale`` ``[1]``, ``[N, 1]``, or one for each block |
| mxfp8-quantized | ``weight`` e4m3; ``weight_scale`` uint8 ``[N, K / 32]`` |
| mxfp4-pack-quantized | ``weight_packed`` uint8 ``[N, K / 2]``; ``weight_scale`` uint8 ``[N, K / 32]`` |
| nvfp4-pack-quantized | the same, ``weight_scale`` e4m3 ``[N, K / 16]``; ``weight_global_scale``, which divides |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgemm.checkpoint.compressed_tensors_groups import MXFP4, MXFP8, NVFP4, PACKED, Group
from qgemm.checkpoint.contents import Contents, Made
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.float_layers import (
    for_each,
    note_float_scale,
    note_fp8,
    note_input_scale,
    note_mxfp4,
    note_mxfp8,
    note_nvfp4,
)
from qgemm.checkpoint.integer_layers import note_int8, note_shifted
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import FLOAT_DTYPES
from qgemm.checkpoint.words import by_rows, pack_int4, select_columns, unpack_words
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FP8, INT4, INT8
from qgemm.numerics.groups import stored_weight
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import pack_codes, packed_width

LEAVES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
)
"""The tensors that a layer may have; besides, it may have a bias, as any layer."""

_ASYMMETRIC = (
    "the zero point is not 0, but the config says that the layer is quantized symmetrically: correct symmetric in the "
    "weights of its group"
)
_SHIFTED = (
    "the zero point of the input is not 0, but the config says that it is quantized symmetrically: correct symmetric "
    "in the input_activations of its group"
)


@dataclass(frozen=True)
class Layer:
    """A layer in the files.

    ``tensors``: those of ``LEAVES`` that it has. ``shape``: the content of its ``weight_shape``. ``g_idx``: the group
    of each column, int64 ``[K]``; None without a ``weight_g_idx``, or if that is -1, which means the same.
    """

    name: str
    tensors: dict[str, StoredTensor]
    shape: tuple[int, int] | None = None
    g_idx: Tensor | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether groups consist of other than neighboring columns."""
        return self.g_idx is not None and bool((self.g_idx.diff() < 0).any())


def problem_with(layer: Layer, group: Group) -> str:
    """Why ``layer`` can't belong to ``group``, by names, shapes and dtypes; empty if it can."""
    leaf, dtype = _weight_of(group)
    weight = layer.tensors.get(leaf)
    if weight is None or weight.dtype != dtype or len(weight.shape) != 2:
        return _unfit(layer, leaf, f"{dtype}, [N, K]")
    N, K = weight.shape
    if group.stored_as == PACKED:
        if layer.shape is None:
            return f"{layer.name} has a weight_packed but no weight_shape"
        N, K = layer.shape
        if (N, cdiv(K * group.weights.bits, 32)) != weight.shape:
            return (
                f"{layer.name}.weight_shape: it says [{N}, {K}], and weight_packed is {list(weight.shape)} of "
                f"{group.weights.bits} bits a value"
            )
    elif leaf == "weight_packed":
        K *= 2
    if problem := _problem_with_scale(layer, group, N, K):
        return problem
    if layer.g_idx is not None:
        size = group.weights.group_size or max(K, 1)
        if not torch.equal(layer.g_idx.sort().values, torch.arange(K, device="cpu") // size):
            return f"{layer.name}.weight_g_idx doesn't put {size} of {K} columns into each of the groups"
    return _problem_with_zero_point(layer, group, N) or _problem_with_inputs(layer, group)


def _problem_with_zero_point(layer: Layer, group: Group, N: int) -> str:
    if group.weights.symmetric:
        return ""
    groups = _groups_of(layer)
    packed, plain = (cdiv(N * group.weights.bits, 32), groups), (N, groups)
    one_each: set[tuple[int, ...]] = {(N,), (1,), ()} if groups == 1 else set()
    shapes: dict[torch.dtype | None, set[tuple[int, ...]]] = {torch.int32: {packed}, INT8.storage: {plain, *one_each}}
    zero_point = layer.tensors.get("weight_zero_point")
    if zero_point is None or zero_point.shape not in shapes.get(zero_point.dtype, set()):
        return _unfit(layer, "weight_zero_point", f"int32 {list(packed)} or int8 {list(plain)}")
    return ""


def _problem_with_inputs(layer: Layer, group: Group) -> str:
    if group.is_static and "input_scale" not in layer.tensors:
        return f"activations are static, but layer {layer.name} has no input_scale"
    if not group.is_static and "input_scale" in layer.tensors:
        return f"activations are dynamic, but layer {layer.name} has an input_scale"
    if group.shifts_inputs:
        zero_point = layer.tensors.get("input_zero_point")
        if zero_point is None or zero_point.dtype != INT8.storage or zero_point.shape not in ((), (1,)):
            return _unfit(layer, "input_zero_point", "torch.int8, [1]")
    return ""


def _weight_of(group: Group) -> tuple[str, torch.dtype]:
    if group.stored_as == PACKED:
        return "weight_packed", torch.int32
    if group.stored_as in (MXFP4, NVFP4):
        return "weight_packed", torch.uint8
    return "weight", FP8.storage if group.weights.kind == "float" else INT8.storage


def _problem_with_scale(layer: Layer, group: Group, N: int, K: int) -> str:
    of_groups = (N, cdiv(K, max(group.weights.group_size or 1, 1)))
    by_strategy: dict[str, set[tuple[int, ...]]] = {
        "tensor": {(1,), ()},
        "channel": {(N, 1), (N,)},
        "group": {of_groups},
        "tensor_group": {of_groups},
        "block": {(cdiv(N, BLOCK), cdiv(K, BLOCK))},
    }
    shapes = by_strategy[group.weights.strategy]
    dtypes = {NVFP4: (FP8.storage,), MXFP4: (torch.uint8,), MXFP8: (torch.uint8,)}.get(group.stored_as, FLOAT_DTYPES)
    scale = layer.tensors.get("weight_scale")
    if scale is None or scale.dtype not in dtypes or scale.shape not in shapes:
        kind = "of a float dtype" if dtypes == FLOAT_DTYPES else str(dtypes[0])
        return _unfit(layer, "weight_scale", f"{kind}, {' or '.join(str(list(each)) for each in sorted(shapes))}")
    if group.stored_as == NVFP4:
        number = layer.tensors.get("weight_global_scale")
        if number is None or number.dtype != torch.float32 or number.shape not in ((), (1,)):
            return _unfit(layer, "weight_global_scale", "torch.float32, [1]")
    elif "weight_global_scale" in layer.tensors:
        return f"{layer.name} has a weight_global_scale, which only nvfp4 has"
    return ""


def _unfit(layer: Layer, leaf: str, wanted: str) -> str:
    found = layer.tensors.get(leaf)
    return f"{layer.name}.{leaf} {'is missing' if found is None else f'is {found}'}; it must be {wanted}"


def note_layer(contents: Contents, layer: Layer, group: Group) -> None:
    """Notes how the tensors of ``layer``, which fits ``group``, are converted."""
    name = layer.name
    try:
        scheme = group.scheme_of(is_ordered=layer.is_ordered)
    except ValueError as error:
        raise CheckpointError(f"{layer.tensors['weight_scale'].path}: layer {name}: {error}") from None
    if group.stored_as == PACKED:
        _note_packed(contents, layer, group)
    elif group.stored_as == NVFP4:
        note_nvfp4(contents, name, "weight_packed", "weight_global_scale", divides=True)
    elif group.stored_as == MXFP4:
        note_mxfp4(contents, name, "weight_packed")
    elif group.stored_as == MXFP8:
        note_mxfp8(contents, name)
    elif group.weights.kind == "float":
        note_fp8(contents, name, scheme)
    elif group.shifts_inputs:
        note_shifted(contents, name)
    else:
        _note_integers(contents, layer, group)
    contents.manifest.layers[name] = scheme
    for leaf in ("weight_shape", "weight_g_idx", "input_global_scale"):
        full_name = f"{name}.{leaf}"
        if full_name in contents.headers and full_name not in contents.conversions:
            contents.pass_over(full_name)
    if "input_scale" in layer.tensors and not group.shifts_inputs:
        note_input_scale(contents, name)
    # Older versions store zero points for symmetric schemes too.
    if "input_zero_point" in layer.tensors and not group.shifts_inputs:
        contents.must_be_zero(f"{name}.input_zero_point", _SHIFTED)
    if "weight_zero_point" in layer.tensors and group.weights.symmetric:
        _must_be_symmetric(contents, layer, group)


def _must_be_symmetric(contents: Contents, layer: Layer, group: Group) -> None:
    packed = layer.tensors["weight_zero_point"].dtype == torch.int32
    name, middle = f"{layer.name}.weight_zero_point", 1 << (group.weights.bits - 1)

    def check(value: Tensor) -> None:
        if packed and layer.shape is not None:
            value = unpack_words(value.t(), group.weights.bits, layer.shape[0]) ^ middle
        if bool((value != 0).any()):
            raise ValueError(_ASYMMETRIC)

    if packed and len(layer.tensors["weight_zero_point"].shape) != 2:
        raise CheckpointError(_unfit(layer, "weight_zero_point", "torch.int32, two-dimensional"))
    contents.look_at(name, check)


def _note_packed(contents: Contents, layer: Layer, group: Group) -> None:
    """Int4 or int8 in words, with zero points in words, and an order of columns."""
    assert layer.shape is not None
    (N, K), bits, name = layer.shape, group.weights.bits, layer.name
    contents.shapes[name] = (N, K)
    shape, dtype = stored_weight(N, K, INT4 if bits == 4 else INT8)

    def make(words: Tensor, *g_idx: Tensor) -> tuple[Tensor, ...]:
        order = torch.argsort(g_idx[0], stable=True) if g_idx else None

        def store(some: Tensor) -> Tensor:
            # q + 8 becomes two's complement of 4 bits, q + 128 two's complement of 8.
            codes = unpack_words(some, bits, K) ^ (1 << (bits - 1))
            codes = codes if order is None else select_columns(codes, order)
            return (pack_codes(codes) if bits == 4 else codes.view(INT8.storage)).contiguous()

        weight = by_rows(store, words, K)
        return (weight,) if order is None else (weight, order.to(torch.int32))

    sources = [f"{name}.weight_packed"]
    made: dict[str, Made] = {f"{name}.weight": (sources[0], shape, dtype)}
    if layer.is_ordered:
        sources.append(f"{name}.weight_g_idx")
        made[f"{name}.input_order"] = (sources[1], (K,), torch.int32)
    contents.convert_together(sources, made, make)
    note_float_scale(contents, name, N)
    if not group.weights.symmetric:
        _note_zero_point(contents, layer, bits, N)


def _note_integers(contents: Contents, layer: Layer, group: Group) -> None:
    """Int8 values; int4 weights use 16 of them."""
    (N, K), name = layer.tensors["weight"].shape, layer.name
    if group.inputs is not None and group.weights.bits == 8:
        note_int8(contents, name)
        return
    note_float_scale(contents, name, N)
    if group.weights.bits == 4:
        contents.convert(f"{name}.weight", f"{name}.weight", (N, packed_width(K)), pack_int4, torch.uint8)
        contents.shapes[name] = (N, K)
    if not group.weights.symmetric:
        _note_zero_point(contents, layer, group.weights.bits, N)


def _note_zero_point(contents: Contents, layer: Layer, bits: int, N: int) -> None:
    """Zero points of groups, packed along N or one per byte."""
    name, groups, middle = f"{layer.name}.weight_zero_point", _groups_of(layer), 1 << (bits - 1)

    def convert(value: Tensor) -> Tensor:
        if value.dtype == torch.int32:
            fields = unpack_words(value.t(), bits, N).t()
            return (fields.to(torch.int16) - middle).to(INT8.storage).contiguous()
        low, high = (int(each) for each in value.aminmax()) if value.numel() else (0, 0)
        if low < -middle or high > middle:
            raise ValueError(
                f"zero points go from {low} to {high}; those of {bits} bits are from {-middle} to {middle}"
            )
        return value if value.ndim == 2 else for_each(value, N)[:, None]

    contents.convert(name, name, (N, groups), convert, INT8.storage)


def _groups_of(layer: Layer) -> int:
    """The number of scales in a row."""
    scale = layer.tensors["weight_scale"]
    return scale.shape[1] if len(scale.shape) == 2 else 1
