"""Layers with int8 activations, which several libraries store in the same way.

Each function checks the headers of one layer's tensors, and notes their conversion in ``Contents``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.float_layers import check_scale, for_each, matrix
from qgemm.checkpoint.signs import note_scaled, with_positive_scales
from qgemm.checkpoint.tensors import FLOAT_DTYPES
from qgemm.numerics.formats import INT8
from qgemm.numerics.zero_points import correction


def note_int8(contents: Contents, layer: str) -> None:
    """Int8 ``weight`` ``[N, K]`` with a scale for each row, or one for all, for inputs without a zero point."""
    N, K = matrix(contents, layer, "weight", INT8.storage).shape
    names = f"{layer}.weight", f"{layer}.weight_scale"
    _check_row_scale(contents, layer, N)
    note_scaled(contents, names, names, ((N, K), (N,)), lambda value: for_each(value.float(), N))


def note_shifted(contents: Contents, layer: str) -> None:
    """The same for inputs with a zero point; the bias subtracts what the zero point adds to the product.

    Inputs that are stored as uint8 have a zero point in uint8; it becomes one of int8, of the same values.
    """
    (N, K), bias = matrix(contents, layer, "weight", INT8.storage).shape, f"{layer}.bias"
    _check_row_scale(contents, layer, N)
    check_scale(contents, f"{layer}.input_scale", FLOAT_DTYPES, {(), (1,)})
    sources = [f"{layer}.{leaf}" for leaf in ("weight", "weight_scale", "input_scale", "input_zero_point")]
    if bias in contents.stored:
        check_scale(contents, bias, FLOAT_DTYPES, {(N,)})
        sources.append(bias)

    def make(weight: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        scale, given = for_each(others[0].float(), N), others[3:]
        input_scale, zero_point = others[1].float().reshape(()), others[2].reshape(())
        if zero_point.dtype == torch.uint8:
            zero_point = (zero_point ^ 128).view(INT8.storage)
        weight, scale = with_positive_scales(weight, scale)
        shift = correction(weight, scale, input_scale, zero_point)
        return weight, scale, input_scale, zero_point, (given[0].double() - shift if given else -shift).float()

    shapes: tuple[tuple[int, ...], ...] = ((N, K), (N,), (), (), (N,))
    dtypes = INT8.storage, torch.float32, torch.float32, INT8.storage, torch.float32
    from_files = [*sources[:4], bias if bias in contents.stored else sources[0]]
    made = dict(zip([*sources[:4], bias], zip(from_files, shapes, dtypes, strict=True), strict=True))
    contents.convert_together(sources, made, make)


def _check_row_scale(contents: Contents, layer: str, N: int) -> None:
    check_scale(contents, f"{layer}.weight_scale", FLOAT_DTYPES, {(), (1,), (1, 1), (N,), (N, 1)})
