"""Products of float inputs with quantized weights on a CPU: some rows of the weight become floats at a time.

``y = x @ W.T`` in float32, where ``W = (q - z) * s``, or ``q * s + z`` with float zero points. The floats of a piece
stay in a cache, where the product reads them. They are made without a step for each value: the high half of a byte,
with the low half cleared, is 16 times an int4 as an int8, and so is the low half after a shift; the bits of an e4m3 or
e2m1, moved, are a float16 of 2^-8 or 2^-14 its value, which is converted eight times as fast as an e4m3; codes of a
codebook are looked up, by whole bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.numerics.formats import FP4, FP8, INT4, Format
from qgemm.numerics.groups import float_scale
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import HALF

# Values at a time: 2 MB of floats, as much as the cache of a core holds.
_PIECE = 1 << 19
# Rows of x up to which the library multiplies them by those of the weight, not the other way round: with two, that
# takes a third of the time (AVX-512, one thread).
_FEW = 7


@torch.autocast("cpu", enabled=False)
def weight_only_linear(x: Tensor, weight: ScaledWeight) -> Tensor:
    """``dispatch.weight_only_linear`` of checked arguments, columns of ``x`` in the weight's order."""
    product = _multiply(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight)
    # Not a view, which autograd wouldn't let be changed in place.
    out = torch.empty(*x.shape[:-1], product.shape[1], dtype=x.dtype, device="cpu")
    rows = out.view(product.shape)
    if weight.bias is None:
        rows.copy_(product)
    else:
        torch.add(product, weight.bias.float(), out=rows)
    return out


def _multiply(x: Tensor, weight: ScaledWeight) -> Tensor:
    """float32 ``[M, N]`` of ``x [M, K]``, without the bias."""
    (M, K), N, group_size = x.shape, weight.values.shape[0], weight.group_size
    if not K:
        return torch.zeros(M, N, dtype=torch.float32, device="cpu")
    groups, read = cdiv(K, group_size), _Reader(weight.form)
    scales = float_scale(weight.scale, weight.global_scale) / read.times
    zeros = None if weight.zero_point is None else weight.zero_point.float()
    adds = weight.zero_point is not None and weight.zero_point.is_floating_point()
    if zeros is not None and not adds:
        zeros *= read.times
    few, x = M <= _FEW, x.float()
    product = torch.empty((M, N) if few else (N, M), dtype=torch.float32, device="cpu")
    # One scale for a row is left to the product.
    by_row = groups == 1 and zeros is None
    step = min(max(_PIECE // max(K, 1), 1), max(N, 1))
    values = torch.zeros(
        step, max(groups * group_size, 2 * HALF * cdiv(K, 2 * HALF)), dtype=torch.float32, device="cpu"
    )
    for start in range(0, N, step):
        part = slice(start, min(start + step, N))
        rows = values[: part.stop - start]
        read.into(rows, weight.values[part])
        if not by_row:
            of_groups = rows[:, : groups * group_size].unflatten(1, (groups, group_size))
            if zeros is not None and not adds:
                of_groups -= zeros[part, :, None]
            of_groups *= scales[part, :, None]
            if zeros is not None and adds:
                of_groups += zeros[part, :, None]
        if few:
            torch.mm(x, rows[:, :K].t(), out=product[:, part])
        else:
            torch.mm(rows[:, :K], x.t(), out=product[part])
    product = product if few else product.t()
    return product.mul_(scales.t()) if by_row else product


class _Reader:
    """Makes floats of stored values of one format: ``times`` what they are."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self.times = {INT4.name: 16.0, FP8.name: 2.0**-8, FP4.name: 2.0**-14}.get(form.name, 1.0)
        if form.has_codebook:
            octets = torch.arange(256, dtype=torch.uint8, device="cpu")
            self._tables = form.decode(octets & 15), form.decode(octets >> 4)

    def into(self, values: Tensor, stored: Tensor) -> None:
        """Writes rows ``stored`` to float32 ``values [n, at least K]``, with numbers of no meaning after the last."""
        if self._form.bits == 4:
            width = stored.shape[1]
            halves = values[:, : 2 * width].unflatten(1, (-1, 2, HALF))
            for half, made in enumerate(self._nibbles(stored)):
                halves[:, :, half] = made.view(len(stored), -1, HALF)
        elif self._form is FP8:
            bits = stored.view(torch.int8).short()
            size = bits & 0x7F
            moved = ((size | ((size + 1) & 0x80)) << 7) | (bits & -0x8000)  # 0x7F, which is NaN, stays one
            values[:, : stored.shape[1]] = moved.view(torch.float16)
        else:
            values[:, : stored.shape[1]] = stored

    def _nibbles(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """What the low halves of bytes stand for, and the high ones."""
        if self._form.table is None:
            return (stored << 4).view(torch.int8), (stored & 0xF0).view(torch.int8)
        if self._form is FP4:
            bits = stored.short()
            low, high = ((bits & 7) << 9) | ((bits & 8) << 12), ((bits & 0x70) << 5) | ((bits & 0x80) << 8)
            return low.view(torch.float16), high.view(torch.float16)
        octets = stored.flatten().int()
        low, high = (table.index_select(0, octets) for table in self._tables)
        return low, high
