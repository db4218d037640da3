"""``OutlierLinear``: an int8 linear layer that keeps a few columns of its input in 16 bits.

``y = int8(x_rest @ weight.T) + x[:, columns] @ outlier_weight.T + bias``, where ``x_rest`` is ``x`` with zeros in
``columns``. This is the decomposition of LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339): in large models a few
channels of the activations are far larger than all others, and a row's scale that covers them leaves no precision for
the rest. LLM.int8() finds the columns anew for every input; here they are fixed, found in calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qgemm.kernels.checks import check_form, check_input
from qgemm.nn.linear import QuantLinear
from qgemm.nn.linear_layer import NOT_FINITE
from qgemm.nn.quant_layer import frozen, narrowed
from qgemm.nn.shard import Shard
from qgemm.numerics.formats import INT8
from qgemm.ops.declare import to_autocast_dtype
from qgemm.scheme import QuantScheme

Layer = TypeVar("Layer", bound="OutlierLinear")


class OutlierLinear(QuantLinear):
    """``QuantLinear`` plus a float product of a few columns. Parameters that differ, for ``c`` columns:

    - ``weight``: has zeros in those columns; the scales are computed without them.
    - ``outlier_columns``: int64 ``[c]``, ascending.
    - ``outlier_weight``: those columns of the float weight, ``[out_features, c]`` in ``dtype``.

    Both products are summed in float32 or int32. The first is rounded to the dtype of ``x``, as is the sum of the two.
    """

    default_scheme = "int8-outliers-16"
    row_names = ("weight", "weight_scale", "outlier_weight")
    index_names = ("outlier_columns",)
    shared_names = (*QuantLinear.shared_names, "outlier_columns")
    outlier_columns: nn.Parameter
    outlier_weight: nn.Parameter
    _of_shard: tuple[Tensor, int, int] | None = None

    def make_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Raises ``ValueError`` if there are fewer columns than the scheme keeps. A new layer keeps the first ones."""
        super().make_parameters(device, dtype)
        count = self.scheme.outlier_columns
        if self.in_features < count:
            raise ValueError(
                f"scheme {self.scheme.name!r} keeps {count} columns in float, and in_features is {self.in_features}: "
                'use "int8", or skip the layer'
            )
        self.outlier_weight = frozen(torch.zeros(self.out_features, count, dtype=dtype, device=device))
        self.outlier_columns = frozen(torch.arange(count, dtype=torch.int64, device=device))

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether activations have columns that stay in 16 bits."""
        return scheme.weight.format is INT8 and scheme.outlier_columns > 0

    def problem_with(self, name: str, value: Tensor) -> str:
        """As in ``QuantLayer``; columns must be columns of the weight, in ascending order."""
        if name == "outlier_columns" and value.numel():
            # All are checked, because the difference of numbers beyond any column wraps around.
            is_within = bool(((value >= 0) & (value < self.whole_in_features)).all())
            if not (is_within and bool((value.diff() > 0).all())):
                return f"must be ascending columns of a weight that has {self.whole_in_features}"
        return super().problem_with(name, value)

    def take_outlier_columns(self, columns: Tensor | None, device: torch.device) -> None:
        """Sets ``outlier_columns``. Raises ``ValueError`` unless they are ascending and as many as the scheme keeps."""
        if columns is None:
            raise ValueError(f"scheme {self.scheme.name!r} needs outlier_columns, which are found in calibration")
        check_form("outlier_columns", columns, (torch.int64,), self.outlier_columns.shape)
        if columns.device.type != "meta" and (problem := self.problem_with("outlier_columns", columns)):
            raise ValueError(f"outlier_columns {problem}")
        self.outlier_columns = frozen(columns.detach().to(device).clone())

    def keep_rows(self, weight: Tensor) -> dict[str, Tensor]:
        """``outlier_weight``: the outlier columns of float rows. Raises ``ValueError`` for NaN or Inf."""
        kept = weight.index_select(1, self.outlier_columns)
        if not bool(kept.isfinite().all()):
            raise ValueError(NOT_FINITE)
        return {"outlier_weight": narrowed(kept)}

    def round_rows(self, weight: Tensor) -> tuple[Tensor, ...]:
        """As in ``QuantLinear``, with zeros in the outlier columns."""
        return super().round_rows(weight.index_fill(1, self.outlier_columns, 0))

    def store_rows(self, values: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> dict[str, Tensor]:
        """``weight``, with zeros in the outlier columns, and ``weight_scale``."""
        return super().store_rows(values.index_fill(1, self.outlier_columns, 0), scale)

    def restore_rows(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``weight * weight_scale[:, None]``, and the outlier columns in their places."""
        rows = super().restore_rows(parameters, dtype)
        return rows.index_copy(1, self.outlier_columns, parameters["outlier_weight"].to(dtype))

    def compute(self, x: Tensor) -> Tensor:
        """The sum of both products."""
        check_input(x, self.in_features)
        if x.device != self.weight_scale.device:
            return super().compute(x)  # raises the error
        x = to_autocast_dtype(x)
        columns, weight = self._own_columns()
        return add_outliers(self.product(x.index_fill(-1, columns, 0)), x, columns, weight)

    def _own_columns(self) -> tuple[Tensor, Tensor]:
        """The outlier columns and their weights; of a row-parallel shard, only those among its own columns.

        A shard keeps the parameters of the whole layer, because processes may have different numbers of outlier
        columns.
        """
        if self._of_shard is None:
            return self.outlier_columns, self.outlier_weight
        columns, start, stop = self._of_shard
        return columns, self.outlier_weight.detach()[:, start:stop]

    def take_shard(self, shard: Shard) -> None:
        """As in ``LinearLayer``."""
        super().take_shard(shard)
        self._find_own_columns()

    def _find_own_columns(self) -> None:
        """Done once; in each call it would make the host wait for the GPU, for the number of columns."""
        if self.shard is None or self.shard.style != "row" or self.outlier_columns.is_meta:
            self._of_shard = None
            return
        columns = self.outlier_columns.detach() - self.shard.rank * self.in_features
        start, stop = (int((columns < end).sum()) for end in (0, self.in_features))  # the columns are ascending
        self._of_shard = columns[start:stop], start, stop

    def _apply(self: Layer, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Layer:
        super()._apply(fn, recurse)
        self._find_own_columns()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._find_own_columns()


def add_outliers(out: Tensor, x: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
    """``out [..., N]`` plus the product of ``columns`` of ``x [..., K]`` with ``weight [N, c]``, in float32."""
    outliers = x.index_select(-1, columns)
    with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):  # autocast doesn't know the meta device
        count = math.prod(x.shape[:-1])  # not -1 in a view, because either may have no columns
        rest_rows, rows = out.reshape(count, out.shape[-1]), outliers.reshape(count, outliers.shape[-1])
        both = torch.addmm(rest_rows, rows, weight.t().to(x.dtype))
    return both.view(out.shape)
