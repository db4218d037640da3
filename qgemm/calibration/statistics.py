"""``InputStatistics``: the statistics of a layer's inputs ``x [..., K]`` that methods use.

``second_moment = sum_t x_t x_t^T / tokens``, which alone determines the squared error of a layer's output:
``mean_t |(W - V) x_t|^2 = trace((W - V) second_moment (W - V)^T)``. It is half of GPTQ's Hessian.

Products of one call's rows are float32, sums over calls are float64. ``rows`` are every ``s``-th row of all calls,
where ``s`` is the smallest power of two that leaves fewer than twice as many as wanted; of these, the most evenly
spread are used. So the result depends on the rows and their order, never on chance or on how rows are divided into
calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Statistics of the inputs ``x [..., K]`` of one layer over all calibration batches, on the layer's device.

    - ``tokens``: the number of rows, at least one.
    - ``channel_amax [K]``: float32, the largest magnitude in each column.
    - ``mean [K]``: float32.
    - ``second_moment [K, K]``: float32, ``sum x x^T / tokens``; only on request.
    - ``rows [n, K]``: in the dtype of ``x``, rows spread evenly over all tokens, in their order; only on request.
    """

    tokens: int
    channel_amax: Tensor
    mean: Tensor
    second_moment: Tensor | None = None
    rows: Tensor | None = None


class StatisticsSum:
    """Accumulates the inputs of one layer, call by call; ``result`` has the statistics so far."""

    def __init__(self, *, second_moment: bool = False, rows: int = 0) -> None:
        """``rows``: the maximum number of rows to keep."""
        self._with_second_moment, self._wanted = second_moment, rows
        self._tokens = 0
        self._amax: Tensor | None = None
        self._sum: Tensor | None = None
        self._products: Tensor | None = None
        self._stride, self._kept = 1, list[Tensor]()

    @torch.no_grad()
    def add(self, x: Tensor, products: Tensor | None = None) -> Tensor | None:
        """Adds the rows of ``x [..., K]``; returns their ``x^T x``, for another layer with the same input.

        ``products``: this product, if it is known. Raises ``ValueError`` if ``x`` holds NaN or Inf.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        if not rows.shape[0]:
            return None
        values = rows.float()
        amax = values.abs().amax(0)
        if not amax.isfinite().all():
            raise ValueError("x holds NaN or Inf: leave this batch out, or find their cause")
        total = values.sum(0, dtype=torch.float64)
        self._amax = amax if self._amax is None else torch.maximum(self._amax, amax)
        self._sum = total if self._sum is None else self._sum.add_(total)
        if self._with_second_moment:
            products = values.T @ values if products is None else products
            self._products = products.double() if self._products is None else self._products.add_(products)
        if self._wanted:
            self._keep(rows)
        self._tokens += rows.shape[0]
        return products

    def _keep(self, rows: Tensor) -> None:
        self._kept.append(rows[-self._tokens % self._stride :: self._stride].clone())
        while sum(map(len, self._kept)) >= 2 * self._wanted:
            self._kept = [torch.cat(self._kept)[::2].clone()]
            self._stride *= 2

    @property
    def result(self) -> InputStatistics | None:
        """The statistics; None if there was no row."""
        if self._amax is None or self._sum is None:
            return None
        rows = None
        if self._wanted:
            rows = torch.cat(self._kept)
            if len(rows) > self._wanted:
                places = torch.arange(self._wanted, device=rows.device) * len(rows) // self._wanted
                rows = rows[places]
        return InputStatistics(
            self._tokens,
            self._amax,
            (self._sum / self._tokens).float(),
            None if self._products is None else (self._products / self._tokens).float(),
            rows,
        )
