"""``Format``: a number format that values are rounded to, and all that the package knows of its numbers.

With a scale, ``q = nearest(x / scale)`` is a value of the format, and ``q * scale`` stands for ``x``; halves round to
even. The scale is ``amax / steps``, in float32, at least ``MIN_SCALE``; 1 where all values are 0, NaN where one is NaN
or Inf. With a zero point ``z``, ``q = nearest(x / scale + z)`` and ``(q - z) * scale`` stands for ``x``; with one that
is a float, ``q = nearest((x - z) / scale)``, and ``q * scale + z``.

A value of 4 bits has a code, 0 to 15: ``to_codes`` and ``decode``. That of an int4 is its two's complement, ``q & 15``.

A new format is a row in ``FORMATS``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The floats that layers compute with."""
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MIN_SCALE = torch.finfo(torch.float32).tiny
"""The smallest scale: the smallest normal float32. A smaller one would have lost its own precision."""


@dataclass(frozen=True)
class Format:
    """One number format.

    - ``name``: what schemes call it.
    - ``storage``: the dtype of one value; ``bits`` of it count, and packed values have no more.
    - ``low``, ``high``: the smallest and the largest value.
    - ``steps``: the scale is the largest magnitude over this; the range, where there is a zero point.
    - ``max_k``: the longest sum of products of two values that their accumulator holds, whatever they are.
    - ``table``: the value of each code, where ``storage`` holds codes. None where it holds the values.
    - ``has_zero_point``: whether there is one; ``float_zeros``: whether it is a float, in the unit of ``x``.
    - ``nearest``: the values nearest to float32, where a formula has them, which are multiples of 1/2.
    - ``excess``: how far the largest magnitude may be beyond ``high`` under a scale that is a power of two, in whose
      place the next larger one would round all values more coarsely.
    """

    name: str
    storage: torch.dtype
    bits: int
    low: float
    high: float
    steps: float
    max_k: int = sys.maxsize
    table: tuple[float, ...] | None = None
    has_zero_point: bool = False
    float_zeros: bool = False
    nearest: Callable[[Tensor], Tensor] | None = None
    excess: float = 1.0

    @cached_property
    def asymmetric(self) -> Format:
        """The whole numbers of as many bits, with a zero point: none has to have its opposite."""
        low = -self.high - 1
        return replace(self, low=low, steps=self.high - low, has_zero_point=True)

    @cached_property
    def with_float_zeros(self) -> Format:
        """The same with zero points that are floats."""
        return replace(self.asymmetric, float_zeros=True)

    @property
    def has_codebook(self) -> bool:
        """Whether its ``table`` holds any numbers, float32, that no formula gives: products look them up."""
        return self.table is not None and self.nearest is None

    def scale_of(self, amax: Tensor) -> Tensor:
        """The scales, float32, of values whose largest magnitudes are ``amax``."""
        amax = amax.float()
        # By a tensor: a GPU divides by a number with its rounded reciprocal.
        scale = (amax / torch.full_like(amax, self.steps)).clamp(min=MIN_SCALE)
        return torch.where(amax == 0, 1.0, scale).masked_fill(~amax.isfinite(), torch.nan)

    def nearest_(self, quotients: Tensor) -> Tensor:
        """Turns float ``x / scale`` into the nearest values, in place and still in float. Saturates; NaN stays."""
        if self.nearest is not None:
            return quotients.copy_(self.nearest(quotients.float()))
        if self.table is not None:
            return quotients.copy_(self.decode(self.encode(quotients)).where(~quotients.isnan(), torch.nan))
        if self.storage.is_floating_point:
            return quotients.copy_(quotients.clamp_(self.low, self.high).to(self.storage))
        return quotients.round_().clamp_(self.low, self.high)

    def range_of(self, values: Tensor) -> tuple[float, float]:
        """The smallest and the largest of ``values`` of ``storage``; NaN if one is, or is no value's code."""
        if self.table is not None and bool((values >> self.bits).any()):
            return torch.nan, torch.nan
        low, high = (values if values.dtype == torch.int8 else self.to_float(values)).aminmax()
        return low.item(), high.item()

    def store(self, quotients: Tensor) -> Tensor:
        """The nearest values of float ``x / scale``, whose memory is used, as ``storage``; 0 for NaN."""
        if self.table is not None:
            return self.encode(quotients)
        return self.nearest_(quotients).nan_to_num_(0.0).to(self.storage)

    def to_float(self, values: Tensor) -> Tensor:
        """float32 of ``values`` as ``storage`` has them."""
        return values.float() if self.table is None else self.decode(values)

    def encode(self, quotients: Tensor) -> Tensor:
        """With a ``table``, the codes, uint8, of the values nearest to float ``x / scale``; that of 0 for NaN."""
        codes, bounds = self._encoding
        values = quotients.float().nan_to_num(0.0, torch.inf, -torch.inf)
        if self.nearest is not None:
            places = (self.nearest(values).sub_(self.low) * 2).int()
        else:  # torch.bucketize takes twice as long on a CPU
            places = torch.zeros(values.shape, dtype=torch.int32, device=values.device)
            for bound in bounds:
                places += values > bound
        return codes.to(values.device).index_select(0, places.flatten()).view(values.shape)

    def decode(self, codes: Tensor) -> Tensor:
        """float32 of codes, uint8."""
        if self.table is None:
            return ((codes ^ 8).to(torch.int8) - 8).float()
        table = torch.tensor(self.table, dtype=torch.float32, device=codes.device)
        return table.index_select(0, codes.flatten().int()).view(codes.shape)

    def to_codes(self, values: Tensor) -> Tensor:
        """The codes, uint8, of 4-bit ``values`` as ``storage`` has them."""
        return values if self.table is not None else (values & 15).view(torch.uint8)

    @cached_property
    def zero_code(self) -> int:
        """The code of 0."""
        return 0 if self.table is None else self.table.index(0.0)

    @cached_property
    def _encoding(self) -> tuple[Tensor, list[float]]:
        """The codes by ascending values, and the last float32 that rounds to each of these but the last.

        With ``nearest``, the codes of all multiples of 1/2, 0 for those that are no values; no bounds.
        """
        assert self.table is not None
        # Of 0 and -0 the first.
        first = {value: code for code, value in reversed(list(enumerate(self.table)))}
        if self.nearest is not None:
            halves = [self.low + place / 2 for place in range(int(2 * (self.high - self.low)) + 1)]
            return torch.tensor([first.get(value, 0) for value in halves], dtype=torch.uint8, device="cpu"), []
        codes = [first[value] for value in sorted(first)]
        values = torch.tensor(sorted(first), dtype=torch.float64, device="cpu")
        middles = (values[1:] + values[:-1]) / 2
        bounds = middles.float()
        # A half goes to the even code: up, then, if the lower one's is odd.
        is_above = (bounds > middles) | ((bounds == middles) & (torch.tensor(codes, device="cpu")[:-1] % 2 == 1))
        bounds = bounds.where(~is_above, torch.nextafter(bounds, torch.full_like(bounds, -torch.inf)))
        return torch.tensor(codes, dtype=torch.uint8, device="cpu"), bounds.tolist()


def _nearest_e2m1(values: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of either sign; NaN stays. A half goes to the even code."""
    size = values.abs().clamp_(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (size / step).round_().mul_(step).copysign_(values)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of bitsandbytes; Dettmers et al. 2023, arXiv 2305.14314, appendix E.
_NF4 = (
    (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334)
    + (-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
    + (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
)

# Of bitsandbytes' fp4, which is no e2m1: twelfths of 1/16, 8, 12, 4, 6, 2 and 3, as float32.
_BNB_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)

# Without -128, so that each value has its opposite.
INT8 = Format("int8", torch.int8, 8, -127, 127, 127, (2**31 - 1) // (128 * 128))
# 7.5 steps: the largest value errs by half a step, as any other may.
INT4 = Format("int4", torch.int8, 4, -8, 7, 7.5)
FP8 = Format("fp8", torch.float8_e4m3fn, 8, -448.0, 448.0, 448.0)
# An excess of 1.2 has the least squared error of normal values in groups of 32: 11.2 % of them; 1.0 and 1.33 11.5 %.
FP4 = Format(
    "fp4",
    torch.uint8,
    4,
    -6.0,
    6.0,
    6.0,
    table=(*_E2M1, *(-value for value in _E2M1)),
    nearest=_nearest_e2m1,
    excess=1.2,
)
NF4 = Format("nf4", torch.uint8, 4, -1.0, 1.0, 1.0, table=_NF4)
# Code 8 is a second 0, not -0.
BNB_FP4 = Format("bnb-fp4", torch.uint8, 4, -1.0, 1.0, 1.0, table=(*_BNB_FP4, *(0.0 - value for value in _BNB_FP4)))

FORMATS: dict[str, Format] = {each.name: each for each in (INT8, INT4, FP8, FP4, NF4, BNB_FP4)}
"""The formats by name: whole numbers; ``fp8`` e4m3; ``fp4`` e2m1; ``nf4`` the 4-bit normal float of QLoRA;
``bnb-fp4`` the values that bitsandbytes calls fp4.
"""

OPERANDS: dict[torch.dtype, Format] = {each.storage: each for each in (INT8, FP8)}
"""Those that products take both operands of, by dtype."""
