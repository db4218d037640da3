"""Layers with weights in small floats, which several libraries store in the same way: fp8, mxfp8, mxfp4, nvfp4.

Each function checks the headers of one layer's tensors, and notes their conversion in ``Contents``. Scales of fp8 are
factors, whatever their name (``weight_scale_inv``), in any float dtype or as powers of two (e8m0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import unsupported
from qgemm.checkpoint.safetensors_file import StoredTensor, unfit
from qgemm.checkpoint.signs import note_scaled
from qgemm.checkpoint.tensors import BIAS_DTYPES, FLOAT_DTYPES, split_name
from qgemm.checkpoint.words import by_rows, unpack_nibbles
from qgemm.numerics.formats import FP8
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import pack_codes, packed_width
from qgemm.scheme import QuantScheme, resolve_scheme

SCALE_DTYPES = (*FLOAT_DTYPES, torch.float8_e8m0fnu)


def note_fp8(contents: Contents, layer: str, scheme: QuantScheme, scale_leaf: str = "weight_scale") -> None:
    """A layer with e4m3 ``weight`` ``[N, K]`` and a scale for the tensor, for each channel, or for each block.

    Raises ``CheckpointError`` unless its tensors are like that, and ``scheme`` has such a scale.
    """
    N, K = matrix(contents, layer, "weight", FP8.storage).shape
    name = f"{layer}.{scale_leaf}"
    sources, names = (f"{layer}.weight", name), (f"{layer}.weight", f"{layer}.weight_scale")
    if scheme.weight.granularity == "block":
        assert scheme.weight.block is not None
        rows, columns = scheme.weight.block
        grid = (cdiv(N, rows), cdiv(K, columns))
        check_scale(contents, name, SCALE_DTYPES, {grid})
        note_scaled(contents, sources, names, ((N, K), grid), block=scheme.weight.block)
    else:
        check_scale(contents, name, SCALE_DTYPES, {(), (1,), (1, 1), (N,), (N, 1)})
        if scheme.is_weight_only:
            note_float_scale(contents, layer, N, scale_leaf)
        else:
            note_scaled(contents, sources, names, ((N, K), (N,)), lambda value: for_each(value.float(), N))
    contents.manifest.layers[layer] = scheme


def note_float_scale(contents: Contents, layer: str, N: int, leaf: str = "weight_scale") -> None:
    """The scales of a layer that computes with any float dtype: unchanged, except for the shape ``[N, groups]``."""
    name, made = f"{layer}.{leaf}", f"{layer}.weight_scale"
    scale = contents.stored[name]
    dtype = scale.dtype if scale.dtype in FLOAT_DTYPES[:3] else torch.float32
    if len(scale.shape) != 2 or scale.shape[0] != N:
        contents.convert(made, name, (N, 1), lambda value: for_each(value.to(dtype), N)[:, None], dtype)
    elif scale.dtype != dtype or name != made:
        contents.convert(made, name, scale.shape, lambda value: value.to(dtype), dtype)


def note_input_scale(contents: Contents, layer: str, leaf: str = "input_scale") -> None:
    """A layer's single scale for its whole input."""
    name = f"{layer}.{leaf}"
    check_scale(contents, name, FLOAT_DTYPES, {(), (1,)})
    contents.convert(f"{layer}.input_scale", name, (), lambda value: value.float().reshape(()))


def note_prescale(contents: Contents, layer: str, leaf: str) -> None:
    """What the columns of a layer's input are multiplied by: ``[K]``, ``[1, K]`` or one number, in any float dtype.

    Raises ``CheckpointError`` if the product is quantized then, which no scheme does.
    """
    scheme, name = contents.manifest.layers[layer], f"{layer}.{leaf}"
    _, K = contents.shapes.get(layer) or contents.headers[f"{layer}.weight"].shape
    tensor = check_scale(contents, name, BIAS_DTYPES, {(K,), (1, K), (1,), ()})
    if not scheme.is_weight_only:
        raise unsupported(
            f"{tensor.path}: {layer} has the scheme {scheme.name!r} and a {leaf}, by which its input would be "
            "multiplied first; qgemm does that only where activations stay in float"
        )
    contents.convert(
        f"{layer}.input_prescale", name, (K,), lambda value: value.flatten().expand(K).clone(), tensor.dtype
    )
    contents.manifest.layers[layer] = resolve_scheme(f"{scheme.name}-prescaled")


def note_mxfp8(contents: Contents, layer: str) -> None:
    """A layer with e4m3 ``weight`` ``[N, K]`` and a power of two for each 32 columns, uint8 ``[N, K / 32]``."""
    N, K = matrix(contents, layer, "weight", FP8.storage).shape
    _check_exponents(contents, layer, N, K)
    contents.manifest.layers[layer] = resolve_scheme("mxfp8")


def note_mxfp4(contents: Contents, layer: str, packed_leaf: str) -> None:
    """A layer with e2m1 ``[N, K / 2]`` bytes and a power of two for each 32 columns."""
    N, K = _note_fp4(contents, layer, packed_leaf)
    _check_exponents(contents, layer, N, K)
    contents.manifest.layers[layer] = resolve_scheme("mxfp4")


def _check_exponents(contents: Contents, layer: str, N: int, K: int) -> None:
    check_scale(contents, f"{layer}.weight_scale", (torch.uint8,), {(N, cdiv(K, 32))})


def note_nvfp4(contents: Contents, layer: str, packed_leaf: str, global_leaf: str, divides: bool) -> None:
    """A layer with e2m1 ``[N, K / 2]`` bytes, ``weight_scale`` e4m3 ``[N, K / 16]`` and one float32 number.

    ``divides``: whether that number divides the scales (compressed-tensors) or multiplies them (ModelOpt).
    """
    N, K = _note_fp4(contents, layer, packed_leaf)
    check_scale(contents, f"{layer}.weight_scale", (FP8.storage,), {(N, cdiv(K, 16))})
    name = f"{layer}.{global_leaf}"
    check_scale(contents, name, (torch.float32,), {(), (1,)})

    def as_pair(value: Tensor) -> Tensor:
        number = value.reshape(())
        one = torch.ones_like(number)
        # Dividing by a power of two, such as qgemm's own number, equals multiplying by its reciprocal.
        if divides and float(torch.frexp(number).mantissa) == 0.5:
            return torch.stack((one / number, one))
        return torch.stack((one, number) if divides else (number, one))

    contents.convert(f"{layer}.weight_global_scale", name, (2,), as_pair)
    contents.manifest.layers[layer] = resolve_scheme("nvfp4")


def _note_fp4(contents: Contents, layer: str, leaf: str) -> tuple[int, int]:
    """Notes a layer's weight whose codes are packed two per byte, low bits first; returns its ``[N, K]``."""
    N, half = matrix(contents, layer, leaf, torch.uint8).shape
    shape = (N, packed_width(2 * half))

    def repack(octets: Tensor) -> Tensor:
        return by_rows(lambda some: pack_codes(unpack_nibbles(some)), octets, 2 * half)

    contents.convert(f"{layer}.weight", f"{layer}.{leaf}", shape, repack, torch.uint8)
    contents.shapes[layer] = (N, 2 * half)
    return N, 2 * half


def matrix(contents: Contents, layer: str, leaf: str, dtype: torch.dtype) -> StoredTensor:
    """The tensor ``leaf`` of a layer, ``[N, K]`` of ``dtype``; raises ``CheckpointError`` for anything else."""
    tensor = contents.stored.get(f"{layer}.{leaf}")
    if tensor is None or tensor.dtype != dtype or len(tensor.shape) != 2:
        raise unfit(contents.path_of(layer), f"{layer}.{leaf}", tensor, f"{dtype}, [N, K]")
    return tensor


def check_scale(
    contents: Contents, name: str, dtypes: tuple[torch.dtype, ...], shapes: set[tuple[int, ...]]
) -> StoredTensor:
    """The scale ``name``; raises ``CheckpointError`` if it is missing, or has another dtype or shape."""
    scale = contents.stored.get(name)
    if scale is None or scale.dtype not in dtypes or scale.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in sorted(shapes))
        kind = "of a float dtype" if dtypes[:3] == BIAS_DTYPES else " or ".join(map(str, dtypes))
        path = contents.path_of(split_name(name)[0]) if scale is None else scale.path
        raise unfit(path, name, scale, f"{kind}, {allowed}")
    return scale


def for_each(value: Tensor, n: int) -> Tensor:
    """Expands one number, or one per row, to one for each of ``n`` rows, in memory of its own."""
    return value.reshape(-1).expand(n).clone()
