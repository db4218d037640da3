"""``WeightOnlyLinear``: a linear layer whose weight alone is quantized, in any format; its products are in float.

``y = x @ W.T + bias``, where ``W = (q - z) * s``, or ``q * s + z`` if ``z`` is a float, with one ``s`` per group of
values along K, or per row. It takes 4 or 8 bits per value, and a little for the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.weight_only.int8_config import MIN_ROWS_FOR_STEPS
from qgemm.nn.linear_layer import LinearLayer, largest
from qgemm.nn.quant_layer import frozen, joined_rows
from qgemm.nn.row_steps import RowSteps
from qgemm.nn.shard import Shard, Split, Style
from qgemm.numerics import groups
from qgemm.numerics.formats import FLOAT_DTYPES, Format
from qgemm.numerics.integers import cdiv
from qgemm.ops.linear import weight_only_linear
from qgemm.scheme import QuantScheme

# Values that are rounded at a time; that takes a float32 copy of them or two.
_PIECE = 1 << 24


class WeightOnlyLinear(LinearLayer):
    """A linear layer with a quantized weight: float ``[..., in_features]`` to ``[..., out_features]``.

    Parameters, none of which require a gradient; ``groups`` is ``ceil(in_features / group_size)``, or 1 for a scheme
    with a scale per channel:

    - ``weight``: for 4 bits uint8 ``[out_features, packed_width(in_features)]``, in the layout of
      ``qgemm.numerics.packing``; for 8 bits int8 or float8_e4m3fn ``[out_features, in_features]``.
    - ``bias``: ``[out_features]`` in ``dtype``, or None.
    - ``weight_scale``: ``[out_features, groups]`` in the scheme's ``scale_dtype``: float32, float16 or bfloat16, as the
      checkpoint has it; uint8 exponents for ``mxfp4`` and ``mxfp8``; float8_e4m3fn for ``nvfp4``.
    - ``weight_zero_point``: ``[out_features, groups]``, int8 for an asymmetric scheme, float32, float16 or bfloat16 for
      one with float zero points; else None.
    - ``weight_global_scale``: float32 ``[2]``, a factor and a divisor for all scales, for ``nvfp4``; else None.
    - ``input_order``: int32 ``[in_features]`` for an ordered scheme; else None. Column ``j`` of the stored weight
      multiplies column ``input_order[j]`` of the input.

    A new layer has scales of NaN until it loads a ``state_dict``. ``from_linear`` makes one from a float layer.
    """

    default_scheme = "int4"
    weight_names = ("weight",)
    scale_names = ("weight_scale",)
    index_names: ClassVar[tuple[str, ...]] = ("weight_zero_point", "weight_global_scale", "input_order")
    row_names: tuple[str, ...] = ("weight", "weight_scale", "weight_zero_point")
    shared_names: ClassVar[tuple[str, ...]] = ("weight_global_scale", "input_order")
    operands: ClassVar[tuple[str, ...]] = (
        "weight", "weight_scale", "weight_zero_point", "weight_global_scale", "input_order", "bias",
    )  # fmt: skip
    whole_names: tuple[str, ...] = shared_names
    numbers: tuple[int, str, int, bool]
    """The fields that a ``ScaledWeight`` has besides ``operands``."""
    steps: RowSteps | None = None
    """The steps of the scales, in layers whose products use them."""
    weight: nn.Parameter
    weight_scale: nn.Parameter
    weight_zero_point: nn.Parameter | None
    weight_global_scale: nn.Parameter | None
    input_order: nn.Parameter | None

    def make_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """``bias`` in ``dtype``."""
        N, K, form, scheme = self.out_features, self.in_features, self.form, self.scheme.weight
        self._take_numbers()
        shape, storage = groups.stored_weight(N, K, form)
        zeros = form.zero_code | form.zero_code << 4 if form.bits == 4 else 0
        self.weight = frozen(torch.full(shape, zeros, dtype=storage, device=device))
        self.bias = self.empty_bias(device, dtype)
        scales, stored_as = (N, cdiv(K, self.group_size)), groups.SCALE_DTYPES[scheme.scale_dtype]
        unknown = 255 if scheme.scale_dtype == "e8m0" else torch.nan
        self.weight_scale = frozen(torch.full(scales, unknown, dtype=stored_as, device=device))
        self.weight_zero_point = self.weight_global_scale = self.input_order = None
        if not scheme.symmetric:
            zeros_as = stored_as if scheme.float_zeros else torch.int8
            self.weight_zero_point = frozen(torch.zeros(scales, dtype=zeros_as, device=device))
        if scheme.scale_dtype == "e4m3":
            self.weight_global_scale = frozen(torch.full((2,), torch.nan, dtype=torch.float32, device=device))
        if scheme.is_ordered:
            self.input_order = frozen(torch.arange(K, dtype=torch.int32, device=device))
        grouped = ("weight", "weight_scale", "weight_zero_point") if scheme.group_size else ("weight",)
        self.column_names = tuple(name for name in grouped if self.stored(name) is not None)
        self.row_names = tuple(name for name in type(self).row_names if self.stored(name) is not None)
        self.whole_names = tuple(name for name in type(self).whole_names if self.stored(name) is not None)

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether ``scheme`` leaves activations in float."""
        return scheme.is_weight_only and scheme.down is None and not scheme.weight.is_prescaled

    @property
    def form(self) -> Format:
        """The weight's number format."""
        return self.scheme.weight.format

    @property
    def group_size(self) -> int:
        """How many values along K share a scale."""
        return self.scheme.weight.group_size or max(self.in_features, 1)

    def _take_numbers(self) -> None:
        is_quantized = self.scheme.activation is not None
        self.numbers = self.in_features, self.scheme.weight.dtype, self.group_size, is_quantized

    @property
    def columns_in_step(self) -> int:
        """The number of columns in a group."""
        return self.scheme.weight.group_size or 1

    def splits(self, style: Style, parts: int = 1) -> dict[str, Split]:
        """As in ``LinearLayer``; 4-bit columns are packed in blocks."""
        made = super().splits(style, parts)
        if style == "row" and self.form.bits == 4:
            made["weight"] = Split(1, codes=self.in_features, fill=self.form.zero_code)
        return made

    def why_whole(self, style: Style, size: int, parts: int = 1) -> str:
        """As in ``LinearLayer``."""
        if style == "row" and self.input_order is not None:
            return "its columns are in an order of their own, in which each process would read all inputs"
        return super().why_whole(style, size, parts)

    def take_shard(self, shard: Shard) -> None:
        """As in ``LinearLayer``."""
        super().take_shard(shard)
        self._take_numbers()

    def settle(self) -> None:
        """As in ``QuantLayer``; also searches for steps, for later calls that must not, such as a compiler's."""
        super().settle()
        if self.steps is not None:
            self.steps.of(self.stored("weight_scale"), MIN_ROWS_FOR_STEPS)

    def accepts_dtype(self, name: str, dtype: torch.dtype) -> bool:
        """As in ``QuantLayer``; float scales and zero points may have any of the three dtypes."""
        if name in ("weight_scale", "weight_zero_point") and self.stored(name).dtype in FLOAT_DTYPES:
            return dtype in FLOAT_DTYPES
        return super().accepts_dtype(name, dtype)

    def check_weight(self, values: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """As in ``LinearLayer``; the scheme's ``scale_dtype`` must be able to hold the scales."""
        super().check_weight(values, scale, zero_point)
        dtype, form = self.scheme.weight.scale_dtype, self.form
        if scale.numel() and dtype != "float32":
            global_scale = groups.global_scale_of(largest(scale) * form.steps, form) if dtype == "e4m3" else None
            if not torch.equal(groups.float_scale(groups.store_scale(scale, dtype, global_scale), global_scale), scale):
                raise ValueError(
                    f"weight's scale isn't {dtype} everywhere, as the scheme {self.scheme.name!r} stores it: round it "
                    "with qgemm.numerics.groups.round_scale before values are rounded with it"
                )
        if zero_point is not None and (problem := self.problem_with("weight_zero_point", zero_point)):
            raise ValueError(f"weight's zero points {problem}")

    def problem_with(self, name: str, value: Tensor) -> str:
        """As in ``QuantLayer``; scales must be finite, zero points and the order within their bounds."""
        if name == "weight_scale":
            is_finite = (value != 255) if value.dtype == torch.uint8 else value.float().isfinite()
            return "" if bool(is_finite.all()) else "holds NaN or Inf"
        if name == "weight_global_scale":
            return "" if bool((value.isfinite() & (value != 0)).all()) else "is not finite, or 0"
        if name == "input_order" and not torch.equal(
            value.sort().values, torch.arange(len(value), device="cpu").to(value)
        ):
            return f"isn't an order of {self.in_features} columns: each must be there once"
        if name == "weight_zero_point" and self.form.float_zeros:
            return "" if bool(value.isfinite().all()) else "holds NaN or Inf"
        if name == "weight_zero_point":
            return _beyond(value, self.form)
        return super().problem_with(name, value)

    @property
    def needs_amax(self) -> bool:
        """Whether it has a global scale."""
        return self.weight_global_scale is not None

    def start_rows(self, device: torch.device, amax: Tensor | None) -> None:
        """Sets the global scale, and the order of columns to the input's."""
        if self.weight_global_scale is not None and amax is not None:
            self.weight_global_scale = frozen(groups.global_scale_of(amax.to(device), self.form))
        if self.input_order is not None:
            self.input_order = frozen(torch.arange(self.in_features, dtype=torch.int32, device=device))

    def round_rows(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Values of the format ``[n, K]``, and scales, float32 ``[n, groups]``, or ``[n]`` for a scale per channel.

        Zero points of the scales' shape come third, if the scheme has some.
        """
        step = max(_PIECE // max(self.in_features, 1), 1)
        values, *others = map(joined_rows, zip(*map(self._round_piece, weight.split(step)), strict=True))
        return values, *(each if self.scheme.weight.group_size else each.flatten() for each in others)

    def _round_piece(self, weight: Tensor) -> list[Tensor]:
        order, dtype = self.input_order, self.scheme.weight.scale_dtype
        weight = weight if order is None else weight[:, order]
        made = groups.quantize_groups(weight, self.group_size, self.form, dtype, self.weight_global_scale)
        return [each for each in made if each is not None]

    def store_rows(self, values: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> dict[str, Tensor]:
        """``weight``, ``weight_scale`` and, if the scheme has zero points, ``weight_zero_point``."""
        shape = values.shape[0], cdiv(self.in_features, self.group_size)
        stored = groups.store_scale(scale.reshape(shape), self.scheme.weight.scale_dtype, self.weight_global_scale)
        made = {"weight": groups.store_values(values, self.form), "weight_scale": stored.contiguous()}
        if zero_point is not None:
            made["weight_zero_point"] = zero_point.reshape(shape).contiguous()
        return made

    def restore_rows(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``(q - z) * s``, or ``q * s + z``, in the input's order of columns."""
        weight, scale = parameters["weight"], parameters["weight_scale"]
        zero_point, global_scale = parameters.get("weight_zero_point"), self.stored("weight_global_scale")
        size, K = self.group_size, self.in_features
        rows = groups.dequantize(weight, scale, zero_point, global_scale, self.form, size, K, dtype)
        order = self.stored("input_order")
        return rows if order is None else groups.to_input_order_(rows, order)

    def compute(self, x: Tensor) -> Tensor:
        """Runs one operator."""
        # Bypasses stored(), which costs the host 0.1 us per parameter, and __getattr__, which costs more.
        own = self._parameters
        weight = own["weight"] if "weight" in own else self.weight  # noqa: SIM401
        scale = own["weight_scale"] if "weight_scale" in own else self.weight_scale  # noqa: SIM401
        zero_point = own["weight_zero_point"] if "weight_zero_point" in own else self.weight_zero_point  # noqa: SIM401
        factor = own["weight_global_scale"] if "weight_global_scale" in own else self.weight_global_scale  # noqa: SIM401
        order = own["input_order"] if "input_order" in own else self.input_order  # noqa: SIM401
        bias = own["bias"] if "bias" in own else self.bias  # noqa: SIM401
        stored = weight, scale, zero_point, factor, order, bias
        assert scale is not None
        step = None if self.steps is None else self.steps.of(scale, x.numel() // max(self.in_features, 1))
        return weight_only_linear(x, ScaledWeight._make((*stored, *self.numbers, step)))


def _beyond(zero_point: Tensor, form: Format) -> str:
    """Describes zero points that lie too far from the values of ``form``: kernels keep the differences in 8 bits."""
    if not zero_point.numel():
        return ""
    low, high = (int(each) for each in zero_point.aminmax())
    fits = form.low <= low and high <= form.high + 1
    return "" if fits else f"go from {low} to {high}; they must be from {form.low:g} to {form.high + 1:g}"
