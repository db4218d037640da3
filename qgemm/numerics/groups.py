"""Groups along K, each with a scale and perhaps a zero point: how a weight is rounded, and what its values stand for.

``W = (q - z) * s``, where ``s`` belongs to ``group_size`` values along K, or to a whole row. If K isn't a multiple of
the group size, the last group of each row is shorter. The dtype of ``z`` tells what it is: int8 as above; a float one
is added to the scaled values, ``W = q * s + z``, as torchao's int4 has it.

A scale is stored in one of these dtypes: float32, float16 or bfloat16; ``e8m0``, uint8 ``e`` for ``2^(e - 127)``, where
255 is NaN; ``e4m3``, float8 times a global scale of the weight. The global scale is a factor and a divisor,
``s = e4m3 * factor / divisor``; other libraries have only one of the two. Values are rounded with the scale as it is
stored.

The dtype ``steps`` is bfloat16 too, but all scales of a row are whole multiples, 1 to 16, of one step. So int4 values
times their multiple fit int8, and the product of a row with int8 values is a single sum of integers. (Integer scales of
groups are from QServe, Lin et al. 2024, https://arxiv.org/abs/2405.04532.) A step has four significant bits, so that
bfloat16 can hold its multiples.

The global scale of a weight quantized here is a power of two, so that ``s`` is exact in float32, and depends only on
the largest scale.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.numerics.formats import FP8, INT4, MIN_SCALE, Format
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import pack_codes, packed_width, unpack_codes

SCALE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "steps": torch.bfloat16,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
"""The dtype of stored scales, by the name that schemes use."""

MAX_STEPS = 16
"""The largest multiple of a step: 16 times -8 still fits int8."""

# Temporaries have this many values at a time.
_PIECE = 1 << 22


def grouped(values: Tensor, group_size: int) -> Tensor:
    """``[n, K]`` as ``[n, groups, group_size]``, with the last group padded with zeros."""
    n, K = values.shape
    count = cdiv(K, group_size)
    return F.pad(values, (0, count * group_size - K)).reshape(n, count, group_size)


def spread(scale: Tensor, group_size: int, K: int) -> Tensor:
    """The scale of each value, ``[n, K]``, from scales of groups ``[n, ceil(K / group_size)]``."""
    if scale.shape[1] == 1:
        return scale.expand(-1, K)
    return scale.repeat_interleave(group_size, dim=1)[:, :K]


def global_scale_of(amax: Tensor, form: Format) -> Tensor:
    """The global scale, float32 ``[2]``, of a weight with largest magnitude ``amax``: a power of two, and 1."""
    wanted = amax.float() / (form.steps * FP8.high)
    power = _power_of_two(wanted.clamp(min=MIN_SCALE)).where(wanted.isfinite(), torch.nan)
    return torch.stack((power, torch.ones_like(power)))


def round_scale(scale: Tensor, dtype: str, form: Format = INT4, global_scale: Tensor | None = None) -> Tensor:
    """Rounds float32 scales to values that ``dtype`` can hold; NaN stays, and none becomes 0.

    ``[n, groups]`` for ``steps``, which are found for each row; any shape for the others.
    """
    if dtype == "steps":
        return _in_steps(scale, _nearest_steps(scale)).where(scale.isfinite(), torch.nan)
    if dtype == "e8m0":
        return _power_of_two(scale / form.excess).where(scale.isfinite(), torch.nan)
    if dtype == "e4m3":
        assert global_scale is not None
        unit = global_scale[0] / global_scale[1]
        least = torch.finfo(FP8.storage).smallest_normal / 8
        quotients = (scale / unit).clamp(min=least, max=FP8.high)
        return (quotients.to(FP8.storage).float() * unit).where(scale.isfinite(), torch.nan)
    return scale.to(SCALE_DTYPES[dtype]).float()


def store_scale(scale: Tensor, dtype: str, global_scale: Tensor | None = None) -> Tensor:
    """Stores float32 scales, which ``dtype`` must be able to hold, in ``dtype``."""
    if dtype == "e8m0":
        mantissa, exponent = torch.frexp(scale)
        return (exponent + 126).where(mantissa.isfinite(), 255).to(torch.uint8)
    if dtype == "e4m3":
        assert global_scale is not None
        return (scale / (global_scale[0] / global_scale[1])).to(FP8.storage)
    return scale.to(SCALE_DTYPES[dtype])


def float_scale(stored: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """Converts stored scales, of any dtype in ``SCALE_DTYPES``, to float32."""
    if stored.dtype == torch.uint8:
        bits = stored.int() << 23
        bits = bits.where(stored != 0, 1 << 22).where(stored != 255, 0x7FC00000)
        return bits.view(torch.float32)
    scale = stored.float()
    return scale if global_scale is None else scale * global_scale[0] / global_scale[1]


def steps_of(scale: Tensor) -> Tensor | None:
    """The float32 step ``[n]`` of each row of float scales ``[n, groups]``; None unless all rows have one.

    A row has a step if its scales are exactly 1 to ``MAX_STEPS`` times the step.
    """
    scale = scale.float()
    largest = _largest(scale)
    step, found = largest, torch.zeros_like(largest, dtype=torch.bool)
    for count in range(1, MAX_STEPS + 1):
        candidate = largest / torch.full_like(largest, count)
        fits = (_in_steps(scale, candidate) == scale).all(1, keepdim=True)
        step = step.where(found | ~fits, candidate)
        found |= fits
    return step.flatten() if bool(found.all()) else None


def _largest(scale: Tensor) -> Tensor:
    """The largest scale of each row, ``[n, 1]``; 1 for rows without groups."""
    return scale.amax(1, keepdim=True) if scale.shape[1] else scale.new_ones(scale.shape[0], 1)


def _in_steps(scale: Tensor, step: Tensor) -> Tensor:
    return (scale / step).round_().clamp_(1, MAX_STEPS) * step


def _nearest_steps(scale: Tensor) -> Tensor:
    """The step ``[n, 1]``, with four significant bits, whose multiples are nearest to each row of ``[n, groups]``."""
    scale = scale.where(scale.isfinite(), 0)
    # An octave from the smallest step that reaches the largest scale: 8 to 15 of a power of two, then even numbers.
    mantissa, exponent = torch.frexp((_largest(scale) / MAX_STEPS).clamp(min=MIN_SCALE))
    scale = torch.ldexp(scale, -exponent)  # now at most 16: errors can be squared
    least = (mantissa * 16).ceil()
    best, least_error = torch.ones_like(mantissa), torch.full_like(mantissa, torch.inf)
    for more in range(8):
        digits = least + more
        step = digits.where(digits < 16, 2 * (digits - 8)) / 16
        error = (_in_steps(scale, step) - scale).square_().sum(1, keepdim=True)
        best, least_error = torch.where(error < least_error, step, best), torch.minimum(error, least_error)
    return torch.ldexp(best, exponent)


def plain_scales(
    weight: Tensor, group_size: int, form: Format, dtype: str, global_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scales for float ``[n, K]``: ``[n, groups]``, rounded to ``dtype`` but in float32; and zero points, or None.

    Without zero points: ``amax / steps``. With zero points, if ``form`` has them: ``(high - low) / steps``, and ``z``
    such that ``low`` is stored as the smallest value. They are int8 for a range that contains 0; or ``dtype``, for any.
    """
    groups = grouped(weight.float(), group_size)
    if not form.has_zero_point:
        amax = groups.abs().amax(-1)
        scale = form.scale_of(amax)
        if dtype in ("e4m3", "steps"):  # groups of zeros must not affect the global scale, or the step
            scale = scale.where(amax != 0, MIN_SCALE)
        return round_scale(scale, dtype, form, global_scale), None
    low, high = groups.amin(-1), groups.amax(-1)
    if form.float_zeros:
        scale = round_scale(form.scale_of(high - low), dtype, form, global_scale)
        return scale, (low - form.low * scale.where(high > low, 0)).to(SCALE_DTYPES[dtype])
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = round_scale(form.scale_of(high - low), dtype, form, global_scale)
    return scale, form.store(form.low - low / scale)


def round_groups(weight: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int, form: Format) -> Tensor:
    """Rounds float ``[n, K]`` to nearest with scales and zero points ``[n, groups]``: values of ``form``."""
    K = weight.shape[1]
    zeros = None if zero_point is None else spread(zero_point, group_size, K)
    if zeros is not None and form.float_zeros:
        return form.store((weight - zeros) / spread(scale, group_size, K))
    quotients = weight / spread(scale, group_size, K)
    if zeros is not None:
        quotients = quotients.round_().add_(zeros)
    return form.store(quotients)


def quantize_groups(
    weight: Tensor,
    group_size: int,
    form: Format = INT4,
    dtype: str = "float32",
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rounds float ``[n, K]`` to nearest: values of ``form``, ``[n, K]``, and ``plain_scales``."""
    scale, zero_point = plain_scales(weight, group_size, form, dtype, global_scale)
    return round_groups(weight.float(), scale, zero_point, group_size, form), scale, zero_point


def stored_weight(N: int, K: int, form: Format) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype of what ``store_values`` returns for ``[N, K]``."""
    return ((N, packed_width(K)), torch.uint8) if form.bits == 4 else ((N, K), form.storage)


def store_values(values: Tensor, form: Format) -> Tensor:
    """Values ``[n, K]`` of ``form`` as a layer stores them: 4-bit values are packed."""
    return pack_codes(form.to_codes(values), form.zero_code) if form.bits == 4 else values.contiguous()


def dequantize(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    form: Format,
    group_size: int,
    K: int,
    dtype: torch.dtype,
) -> Tensor:
    """The float weight ``[n, K]`` in float32, or in float64 if that is ``dtype``, then in ``dtype``.

    ``weight``: from ``store_values``. ``scale``: as stored, ``[n, ceil(K / group_size)]``.
    """
    n = weight.shape[0]
    out = torch.empty(n, K, dtype=dtype, device=weight.device)
    step = max(1, _PIECE // max(K, 1))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    for start in range(0, n, step):
        part = slice(start, start + step)
        values = form.decode(unpack_codes(weight[part], K)) if form.bits == 4 else weight[part]
        values, scales = values.to(exact), spread(float_scale(scale[part], global_scale), group_size, K)
        zeros = None if zero_point is None else spread(zero_point[part], group_size, K)
        if zeros is None:
            out[part] = values.mul_(scales)
        elif zeros.is_floating_point():
            out[part] = values.mul_(scales).add_(zeros)
        else:
            out[part] = values.sub_(zeros).mul_(scales)
    return out


def to_input_order_(rows: Tensor, order: Tensor) -> Tensor:
    """Reorders ``[n, K]``, whose column ``j`` belongs to input column ``order[j]``, to the input's order, in place."""
    order = order.long()
    for part in rows.split(max(1, _PIECE // max(rows.shape[1], 1))):
        part.copy_(torch.empty_like(part).index_copy_(1, order, part))
    return rows


def _power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two that is at least ``scale``, from 2^-126 to 2^127."""
    mantissa, exponent = torch.frexp(scale)
    exponent = exponent.where(mantissa != 0.5, exponent - 1).clamp(-126, 127)
    return torch.ldexp(torch.ones_like(scale), exponent)
