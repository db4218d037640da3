"""Rounding of weights ``[N, K]`` to nearest, with plain scales or with the scales of minimum squared error.

``q`` is the value of the format nearest to ``w / scale``, and ``q * scale`` stands for ``w``; ``numerics/formats.py``
defines the plain scale of each format. A scale belongs to a row, or to ``group_size`` values of a row; if K isn't a
multiple of that, the last group of each row is shorter. int8 per row gives the same bits as ``kernels.quantize_rows``.

The scale of minimum squared error is searched among multiples of the plain one, including the plain one: a smaller
scale clips the largest values and rounds the others more finely. The error can be measured at the layer's output: with
the second moment ``S`` of the layer's inputs, a row's error ``e = q * scale - w`` changes its output by ``e S e^T`` in
the mean square. For a group, that uses the group's own block of ``S``; with only the diagonal of ``S``, it is
``sum_k S_kk e_k^2``. For long rows, multiples are first ranked by an approximation of ``S``: its 96 largest directions,
and a diagonal for the rest. Then the best six and the plain one are compared by ``S`` itself. At K = 2048 that takes a
quarter of the products. It missed up to 0.1 % of the minimum error with 4 bits, nothing with 8 (rows of 384 and 768 of
even and of heavy-tailed weights, inputs from white ones to those of few directions).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.calibration.expert_work import decide_experts
from qgemm.calibration.method import Block, Method, Part, QuantizedWeight
from qgemm.calibration.rounded_part import rounded_moment, rounded_weight
from qgemm.numerics.blocks import block_scales
from qgemm.numerics.formats import MIN_SCALE, Format
from qgemm.numerics.groups import global_scale_of, grouped, plain_scales, round_groups, round_scale, spread
from qgemm.scheme import TensorScheme

# Multiples of the plain scale. 1 comes first: of equal errors, the first one's scale is used.
_MULTIPLES = (1.0, *(percent / 100 for percent in range(106, 38, -2) if percent != 100))
_POWERS = (1.0, 2.0, 0.5)
# Values at a time, so that the search needs little memory besides the weight.
_PIECE = 1 << 24
# For rows longer than this, multiples are ranked first; the directions of the second moment, and how many are compared.
_LONG_ROW = 256
_DIRECTIONS = 96
_FINALISTS = 6


def nearest_scale(weight: Tensor, scheme: TensorScheme) -> Tensor:
    """The plain scale of a float weight ``[N, K]``: float32 ``[N]``, or ``[N, ceil(K / group_size)]``.

    For a scheme with blocks, the rows of a block have the same scale.
    """
    return _plain(weight, scheme)[0]


def zero_points(weight: Tensor, scheme: TensorScheme) -> Tensor | None:
    """The zero points of a float weight, as they are stored, in the shape of its scale; None for a symmetric scheme.

    They are those of the plain scale: a multiple of the scale covers the same multiple of the range.
    """
    return None if scheme.symmetric else _plain(weight, scheme)[1]


@torch.no_grad()
def mse_scale(weight: Tensor, scheme: TensorScheme, second_moment: Tensor | None = None) -> Tensor:
    """The multiple of ``nearest_scale``, from 0.40 to 1.06, with the minimum squared error of each row or group.

    For scales that are powers of two, multiples are the half and the double. ``second_moment``: of the layer's inputs,
    ``[K, K]``, or ``[K]`` for its diagonal; the error is then that of the layer's output. Groups are searched one by
    one, as if all others were exact.
    """
    (plain, zero), group_size, form = _plain(weight, scheme), scheme.group_size, scheme.format
    if scheme.block is not None:
        return plain  # the search is for rows
    dtype = torch.promote_types(weight.dtype, torch.float32)
    unit = _global_scale(weight, scheme)
    # Steps are derived afterwards, from the scales of whole rows.
    own_dtype = "bfloat16" if scheme.scale_dtype == "steps" else scheme.scale_dtype
    fit = functools.partial(round_scale, dtype=own_dtype, form=form, global_scale=unit)
    search: _Search
    if second_moment is not None and second_moment.ndim == 2 and group_size is None and weight.shape[1] > _LONG_ROW:
        search = _RankedSearch(second_moment.to(dtype), form, fit)
    else:
        multiples = _POWERS if scheme.scale_dtype == "e8m0" else _MULTIPLES
        importance = None if second_moment is None else _importance(second_moment.to(dtype), group_size)
        search = _Search(form, fit, functools.partial(_weighted, importance=importance), multiples)
    scales, zeros = (
        each.reshape(len(weight), -1) for each in (plain, torch.zeros_like(plain) if zero is None else zero)
    )
    rows = max(_PIECE // weight.shape[1], 1)
    pieces = zip(weight.split(rows), scales.split(rows), zeros.split(rows), strict=True)
    best = torch.cat([search.best(_grouped(part.to(dtype), group_size), *own) for part, *own in pieces])
    if scheme.scale_dtype == "steps":
        best = round_scale(best, "steps")
    return best.reshape(plain.shape)


def round_weight(weight: Tensor, scale: Tensor, scheme: TensorScheme) -> QuantizedWeight:
    """Rounds a float weight ``[N, K]`` to nearest, with a scale from ``nearest_scale`` or ``mse_scale``."""
    values = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    size, zero = scheme.group_size or max(weight.shape[1], 1), zero_points(weight, scheme)
    rows, zeros = (None if each is None else each.reshape(len(weight), -1) for each in (scale, zero))
    assert rows is not None
    return QuantizedWeight(round_groups(values, rows, zeros, size, scheme.format), scale, zero)


def round_to_nearest(weight: Tensor, scheme: TensorScheme) -> QuantizedWeight:
    """Rounds a finite float weight ``[N, K]`` to nearest, with its plain scales."""
    weight = weight.detach().float()
    return round_weight(weight, nearest_scale(weight, scheme), scheme)


def round_by_mse(weight: Tensor, second_moment: Tensor | None, scheme: TensorScheme) -> QuantizedWeight:
    """Rounds a float weight ``[N, K]`` to nearest, with its ``mse_scale``."""
    return round_weight(weight, mse_scale(weight, scheme, second_moment), scheme)


def dequantize(quantized: QuantizedWeight, scheme: TensorScheme, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a quantized weight stands for, ``[N, K]`` in ``dtype``."""
    values, size = scheme.format.to_float(quantized.values).to(dtype), scheme.group_size
    scale = expand_scale(quantized.scale, size, values.shape[1]).to(dtype)
    if quantized.zero_point is None:
        return values * scale
    zero = expand_scale(quantized.zero_point, size, values.shape[1])
    return values * scale + zero if scheme.float_zeros else (values - zero) * scale


def expand_scale(scale: Tensor, group_size: int | None, K: int) -> Tensor:
    """A scale ``[N]`` as ``[N, 1]``, a scale of groups as ``[N, K]``."""
    return scale[:, None] if group_size is None else spread(scale, group_size, K)


@torch.no_grad()
def output_loss(weight: Tensor, approximation: Tensor, second_moment: Tensor) -> float:
    """``mean |x (W - V)^T|^2 / mean |x W^T|^2`` for a weight ``W``, its ``approximation`` ``V``, and inputs ``x``.

    Both are ``[N, K]``; ``x`` only matters through its ``second_moment [K, K]``. 0 if the layer's output is 0.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    whole = output_power(weight, second_moment)
    return output_power(weight.to(dtype) - approximation.to(dtype), second_moment) / whole if whole else 0.0


@torch.no_grad()
def output_power(weight: Tensor, second_moment: Tensor) -> float:
    """``mean |x W^T|^2 = trace(W S W^T)`` for a weight ``[N, K]`` and inputs ``x`` of this ``second_moment [K, K]``."""
    values = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return max((values @ second_moment.to(values.dtype)).mul_(values).sum(dtype=torch.float64).item(), 0.0)


@dataclass(frozen=True)
class MSEWeights(Method):
    """Rounds weights to nearest with the scales of minimum squared error, found among multiples of the plain ones.

    ``by_input``: minimize the error of the layers' outputs on the calibration data; otherwise that of the weights,
    which needs no data. Raises ``ValueError`` if ``by_input`` is set without data.
    """

    name: ClassVar[str] = "mse-weights"
    settles: ClassVar[tuple[Part, ...]] = ("weights",)
    needs_data: ClassVar[bool] = False
    by_input: bool = False

    def apply(self, block: Block) -> None:
        """Rounds the weight of every layer."""
        if self.by_input and not block.calls:
            raise ValueError(
                "mse-weights with by_input needs calibration data: pass calibration, or leave by_input out"
            )
        seen = block.collect(second_moment=True) if self.by_input else {}
        for name, work in block.layers.items():
            moment = rounded_moment(work, seen.pop(name)) if name in seen else None
            if self.by_input and moment is None:
                work.notes.append("mse-weights: it saw no tokens, so all inputs count alike")
            work.weight = round_by_mse(rounded_weight(work), moment, work.scheme.weight)
        for experts in block.experts.values():
            decide_experts(block, experts, self.name, round_by_mse, needs_rows=self.by_input)


def _grouped(values: Tensor, group_size: int | None) -> Tensor:
    """``[N, K]`` as ``[N, groups, size]``, the last group filled up with zeros."""
    return grouped(values, group_size or values.shape[1])


def _importance(moment: Tensor, group_size: int | None) -> Tensor:
    """The weights of errors: ``[groups, size]`` from a diagonal, ``[groups, size, size]`` from a whole moment."""
    if moment.ndim == 1:
        return _grouped(moment[None], group_size)[0]
    K = len(moment)
    size = group_size or K
    padded = F.pad(moment, (0, -K % size, 0, -K % size))
    groups = range(0, len(padded), size)
    return torch.stack([padded[start : start + size, start : start + size] for start in groups])


def _plain(weight: Tensor, scheme: TensorScheme) -> tuple[Tensor, Tensor | None]:
    """The plain scale, and the zero points of an asymmetric scheme."""
    if scheme.block is not None:
        return block_scales(weight.detach()).repeat_interleave(scheme.block[0], dim=0)[: len(weight)], None
    size, unit = scheme.group_size or weight.shape[1], _global_scale(weight, scheme)
    scale, zero = plain_scales(weight, size, scheme.format, scheme.scale_dtype, unit)
    if scheme.group_size is None:
        return scale.squeeze(-1), None if zero is None else zero.squeeze(-1)
    return scale, zero


def _global_scale(weight: Tensor, scheme: TensorScheme) -> Tensor | None:
    """The number that all scales are multiples of, for formats that store them so."""
    return global_scale_of(weight.abs().amax(), scheme.format) if scheme.scale_dtype == "e4m3" else None


def _weighted(error: Tensor, importance: Tensor | None) -> Tensor:
    """The loss ``[N, groups]`` of an ``error [N, groups, size]``, which it may change."""
    if importance is None:
        return error.square_().sum(-1)
    if importance.ndim == 2:
        return error.square_().mul_(importance).sum(-1)
    return torch.einsum("ngi,gij,ngj->ng", error, importance, error)


@dataclass(eq=False)
class _Search:
    """A search for the best multiples of scales.

    ``fit``: rounds scales to those that can be stored. ``loss``: of an error ``[N, groups, size]``, which it may
    change.
    """

    form: Format
    fit: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor], Tensor]
    multiples: Iterable[float | Tensor]

    def best(self, groups: Tensor, plain: Tensor, zero: Tensor) -> Tensor:
        """The multiple of ``plain [N, groups]`` with the minimum loss, for ``groups [N, groups, size]``."""
        best, least = plain, torch.full_like(plain, torch.inf, dtype=groups.dtype)
        for multiple in self.multiples:
            scale = self.fit((plain * multiple).clamp(min=MIN_SCALE))
            own = self.loss(_rounding_error(groups, scale, zero, self.form))
            better = own < least
            best, least = torch.where(better, scale, best), torch.where(better, own, least)
        return best


def _rounding_error(groups: Tensor, scale: Tensor, zero: Tensor, form: Format) -> Tensor:
    """The error of rounding ``groups [N, groups, size]`` with ``scale`` and ``zero [N, groups]``."""
    if form.float_zeros:
        rest = groups - zero[..., None]
        return form.nearest_(rest / scale[..., None]).mul_(scale[..., None]).sub_(rest)
    quotients = groups / scale[..., None]
    if form.has_zero_point:
        rounded = form.nearest_(quotients.round_().add_(zero[..., None])).sub_(zero[..., None])
    else:
        rounded = form.nearest_(quotients)
    return rounded.mul_(scale[..., None]).sub_(groups)


class _RankedSearch(_Search):
    """A search over scales of whole rows by the complete ``moment [K, K]``, with few products with it."""

    def __init__(self, moment: Tensor, form: Format, fit: Callable[[Tensor], Tensor]) -> None:
        super().__init__(form, fit, self._loss, _MULTIPLES)
        self._moment = moment
        # The largest directions, by two steps of subspace iteration, always from the same start.
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(len(moment), _DIRECTIONS + 8, generator=generator, dtype=torch.float32, device="cpu")
        basis = torch.linalg.qr(moment @ start.to(moment))[0]
        basis = torch.linalg.qr(moment @ basis)[0]
        values, vectors = torch.linalg.eigh(basis.T @ moment @ basis)
        self._directions = (basis @ vectors)[:, -_DIRECTIONS:] * values[-_DIRECTIONS:].clamp(min=0).sqrt()
        self._rest = (moment.diagonal() - self._directions.square().sum(1)).clamp(min=0)

    def best(self, groups: Tensor, plain: Tensor, zero: Tensor) -> Tensor:
        """The best scale ``[N, 1]`` of ``groups [N, 1, K]``."""
        multiples = torch.tensor(_MULTIPLES, dtype=plain.dtype, device=plain.device)
        ranks = []
        for multiple in multiples:
            scale = self.fit((plain * multiple).clamp(min=MIN_SCALE))
            error = _rounding_error(groups, scale, zero, self.form).squeeze(1)
            ranks.append((error @ self._directions).square_().sum(-1) + error.square_() @ self._rest)
        # The plain scale comes first.
        finalists = torch.stack(ranks[1:], 1).topk(_FINALISTS, largest=False).indices.sort(1).values + 1
        finalists = torch.cat((torch.zeros_like(finalists[:, :1]), finalists), 1)
        return _Search(self.form, self.fit, self._loss, multiples[finalists].split(1, 1)).best(groups, plain, zero)

    def _loss(self, error: Tensor) -> Tensor:
        rows = error.squeeze(1)
        return (rows @ self._moment).mul_(rows).sum(-1, keepdim=True)
