"""``LinearLayer``: what all quantized linear layers share: conversion from a float layer, and back.

Each class computes one family of schemes, and defines how rows of a weight become its parameters and which float values
these stand for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from qgemm.kernels.checks import check_form
from qgemm.nn.quant_layer import QuantLayer, check_dtype, check_sizes, frozen, narrowed, traced_as_leaf
from qgemm.nn.shard import Shard, Split, Style
from qgemm.numerics.formats import INT8
from qgemm.numerics.groups import SCALE_DTYPES
from qgemm.numerics.integers import cdiv
from qgemm.numerics.zero_points import ZERO_POINTS, is_zero_point
from qgemm.ops.direct import check_is_tensor
from qgemm.scheme import QuantScheme, resolve_scheme

Linear = TypeVar("Linear", bound="LinearLayer")

InputScale: TypeAlias = "Tensor | float | tuple[Tensor | float, Tensor | int]"
"""The scale of a static activation, or, for an asymmetric scheme, the pair of a scale and a zero point."""

NOT_FINITE = (
    "weight holds NaN or Inf, or numbers too large for a scale, which can't be quantized: repair the checkpoint or "
    "skip the layer"
)


class LinearLayer(QuantLayer):
    """A quantized ``nn.Linear``: float ``[..., in_features]`` to ``[..., out_features]``.

    - ``row_names``: its parameters with a row for each row of the weight, which ``convert_rows`` makes.
    - ``shared_names``: its parameters that describe the input or all rows; layers that one product computes must have
      equal ones.
    - ``whole_names``: those that depend on the weight as a whole, which ``start_rows`` makes.
    - ``default_scheme``: the name of the scheme of a layer that is made without one.
    - ``rows_in_step``: how many rows of the weight share a row of some parameter; ``columns_in_step``: how many columns
      share one.
    - ``column_names``: its parameters with columns for the weight's columns.
    - ``folds_bias``: whether ``bias`` depends on the weight, so that it differs from the float layer's.
    - ``bias``: ``[out_features]``, or None. ``has_bias``: whether the float layer has one.
    - ``of_conv1d``: whether the float layer is transformers' ``Conv1D``.
    """

    made_by = "from_linear"
    row_names: tuple[str, ...]
    rows_in_step: ClassVar[int] = 1
    column_names: tuple[str, ...] = ("weight",)
    shared_names: ClassVar[tuple[str, ...]] = ()
    whole_names: tuple[str, ...] = ()
    default_scheme: ClassVar[str] = "int8"
    folds_bias: ClassVar[bool] = False
    of_conv1d: bool = False
    in_features: int
    out_features: int
    has_bias: bool
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scheme: str | QuantScheme | None = None,
    ) -> None:
        """Makes a layer that waits for a ``state_dict``. ``dtype``: of what stays in float; None is PyTorch's default.

        ``bias``: whether the float layer has one. ``scheme``: a name from ``SCHEMES``, or a scheme; None takes
        ``default_scheme``. Raises ``ValueError`` for a scheme that this class doesn't compute, for sizes that aren't
        whole numbers of at least 0, for a ``dtype`` that no layer computes with, and for ``in_features`` above what
        int32 sums hold; ``TypeError`` if ``scheme`` isn't a scheme.
        """
        super().__init__()
        check_sizes(in_features=in_features, out_features=out_features)
        check_dtype(dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.scheme = resolve_scheme(self.default_scheme if scheme is None else scheme)
        if not self.computes(self.scheme):
            raise ValueError(
                f"scheme {self.scheme.name!r} isn't for {type(self).__name__}: "
                f"its class is qgemm.nn.linear_class({self.scheme.name!r})"
            )
        if in_features > self.scheme.max_k:
            raise ValueError(
                f"in_features is {in_features}; int32 sums hold up to {self.scheme.max_k}: split the layer along K and "
                "add the parts"
            )
        self.make_parameters(device, dtype)

    @abstractmethod
    def make_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Sets every parameter: quantized values of 0, scales of NaN, and the bias before them."""

    def empty_bias(self, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Parameter | None:
        """A bias of zeros; in a class that ``folds_bias`` it is float32, even if the float layer has no bias."""
        if not (self.has_bias or self.folds_bias):
            return None
        dtype = torch.float32 if self.folds_bias else dtype
        return frozen(torch.zeros(self.out_features, dtype=dtype, device=device))

    @classmethod
    @abstractmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether this class computes ``scheme``."""

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor:
        """The result of ``forward`` for a plain tensor."""

    @property
    def needs_amax(self) -> bool:
        """Whether rounding a row needs the largest magnitude of the whole weight."""
        return False

    def start_rows(self, device: torch.device, amax: Tensor | None) -> None:
        """Sets ``whole_names``, on ``device``, before rows are converted. ``amax``: given if ``needs_amax``."""

    @abstractmethod
    def round_rows(self, weight: Tensor) -> tuple[Tensor, ...]:
        """``(values, scale)`` of float rows ``[n, K]``, rounded to nearest, as ``store_rows`` accepts them.

        For an asymmetric weight, zero points come third.

        A row with NaN or Inf has a scale that isn't finite.
        """

    @abstractmethod
    def store_rows(self, values: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> dict[str, Tensor]:
        """The parameters, by ``row_names``, that hold quantized rows ``[n, K]`` and their scales."""

    @abstractmethod
    def restore_rows(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The float rows ``[n, K]`` that ``parameters``, by ``row_names``, stand for, in float32 or float64."""

    def check_weight(self, values: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Raises ``ValueError`` unless this is a weight of the layer's size and format, with scales above 0.

        ``values``: ``[N, K]``; ``scale``: float32 ``[N]``, or ``[N, groups]`` for a scheme with groups; ``zero_point``:
        in the shape of ``scale``, for a weight that has some: int8, or for float zero points the scales' stored dtype.
        """
        form, size = self.scheme.weight.format, self.scheme.weight.group_size
        shape = [self.out_features, self.in_features]
        scale_shape = shape[:1] if size is None else [shape[0], cdiv(shape[1], size)]
        if values.dtype != form.storage or list(values.shape) != shape:
            found = f"{values.dtype} {list(values.shape)}"
            raise ValueError(f"weight's values are {found}; they must be {form.storage} {shape}")
        check_form("weight's scale", scale, (torch.float32,), scale_shape)
        if form.has_zero_point != (zero_point is not None):
            wants = "needs zero points" if form.has_zero_point else "takes no zero points"
            raise ValueError(f"scheme {self.scheme.name!r} {wants} with weight's values and scale")
        if zero_point is not None:
            dtype = SCALE_DTYPES[self.scheme.weight.scale_dtype] if form.float_zeros else torch.int8
            check_form("weight's zero point", zero_point, (dtype,), scale_shape)
        if values.device.type == "meta" or scale.device.type == "meta":
            raise ValueError("weight is on meta, without values: pass the rounded values")
        if values.numel():
            low, high = form.range_of(values)
            if not (form.low <= low and high <= form.high):
                raise ValueError(
                    f"weight's values go from {low} to {high}; they must be from {form.low} to {form.high}"
                )
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError("weight's scale must be finite and greater than 0 everywhere")

    def convert_rows(self, weight: Tensor) -> dict[str, Tensor]:
        """The parameters called ``row_names`` for float rows ``[n, K]``. Raises ``ValueError`` for NaN or Inf."""
        values, scale, *zero_point = self.round_rows(narrowed(weight))
        if not scale.isfinite().all():
            raise ValueError(NOT_FINITE)
        return {**self.store_rows(values, scale, *zero_point), **self.keep_rows(weight)}

    def rows_from(self, start: int, stop: int) -> dict[str, Tensor]:
        """The rows of the parameters in ``row_names`` that belong to rows ``start`` to ``stop`` of the weight.

        ``start`` must be a multiple of ``rows_in_step``.
        """
        return {name: self.stored(name).detach()[start:stop] for name in self.row_names}

    def take_weight(self, source: Tensor, decided: tuple[Tensor, ...] | None = None) -> None:
        """Sets the weight, on its device, from float ``source [N, K]``; raises ``ValueError`` for NaN or Inf.

        ``decided``: the weight that a method has rounded, as ``from_linear`` accepts it; None rounds to nearest.
        """
        if decided is None:
            self.start_rows(source.device, largest(source) if self.needs_amax else None)
            made = self.convert_rows(source)
        else:
            values, scale, *zero_point = (part.detach().to(source.device) for part in decided)
            self.start_rows(source.device, largest(scale) * self.scheme.weight.format.steps)
            made = {**self.store_rows(values, scale, *zero_point), **self.keep_rows(source)}
        for name, value in made.items():
            setattr(self, name, frozen(value))

    def keep_rows(self, weight: Tensor) -> dict[str, Tensor]:
        """The other parameters in ``row_names``, which hold part of float rows ``[n, K]``; most layers have none."""
        return {}

    @classmethod
    def from_linear(
        cls: type[Linear],
        linear: nn.Module,
        scheme: str | QuantScheme = "int8",
        input_scale: InputScale | None = None,
        *,
        weight: tuple[Tensor, ...] | None = None,
        outlier_columns: Tensor | None = None,
    ) -> Linear:
        """Makes a layer quantized from ``linear``, on its device: an ``nn.Linear``, or transformers' ``Conv1D``.

        - ``input_scale``: the activation's scale, for a static scheme; with its zero point for an asymmetric one.
        - ``weight``: quantized values and their scales, rounded by a method such as GPTQ:
          ``[out_features, in_features]`` of the format's ``storage``, and float32 ``[out_features]``, or
          ``[out_features, groups]`` for a scheme with groups; then its zero points, if the scheme has some, of the
          scales' shape. For a rotated layer this is the rotated weight; for an ordered one, its columns are in
          their stored order. None rounds to nearest.
        - ``outlier_columns``: int64, ascending: the columns to keep in float, for a scheme that keeps some.

        Raises ``ValueError`` if the weight holds NaN or Inf, if ``weight`` doesn't fit this layer, or if
        ``input_scale`` or ``outlier_columns`` doesn't fit ``scheme``; ``TypeError`` if ``linear`` isn't a linear layer.
        ``linear`` is unchanged; the two share the bias.
        """
        if not is_float_linear(linear):
            kind = type(linear).__name__
            raise TypeError(f"linear is a {kind}; from_linear takes an nn.Linear or transformers' Conv1D")
        source = linear_weight(linear).detach()
        if not source.is_floating_point() or source.dtype.itemsize == 1:
            raise TypeError(f"linear's weight is {source.dtype}; from_linear quantizes float16, bfloat16 and wider")
        bias: Tensor | None = linear.bias  # type: ignore[assignment]
        out_features, in_features = source.shape
        dtype = torch.float32 if source.dtype == torch.float64 else source.dtype
        layer = cls(in_features, out_features, bias is not None, "meta", dtype, scheme)
        layer.take_input_scale(input_scale, source.device)
        layer.take_outlier_columns(outlier_columns, source.device)
        if weight is not None:
            layer.check_weight(*weight)
        if source.device.type != "meta":
            layer.take_weight(source, weight)
        layer.take_bias(None if bias is None else bias.detach())
        layer.settle()
        layer.of_conv1d = is_conv1d(linear)
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` in float16, bfloat16 or float32 to ``[..., out_features]`` in the same dtype.

        Under autocast the output has autocast's dtype, as with ``nn.Linear``. For a nested tensor it returns one of the
        same layout, with rows of the same lengths. The argument is called ``input``, as in ``nn.Linear``, for models
        that pass it by name.
        """
        if type(input) is not Tensor:
            if isinstance(input, Proxy):
                return traced_as_leaf(self, input)
            check_is_tensor(input)
        if input.is_nested:
            return self._of_nested(input)
        if self.shard is None:
            return self.compute(input)
        return self.shard.leave(self.compute(self.shard.enter(input)))

    @property
    def float_numel(self) -> int:
        """The number of values in the float layer's weight and bias."""
        return (self.in_features + self.has_bias) * self.out_features

    @property
    def columns_in_step(self) -> int:
        """How many columns of the weight share a column of some parameter."""
        return 1

    @property
    def whole_in_features(self) -> int:
        """``in_features`` of the whole layer, if this is a shard of one."""
        is_part = self.shard is not None and self.shard.style == "row"
        return self.in_features * self.shard.size if is_part else self.in_features  # type: ignore[union-attr]

    def splits(self, style: Style, parts: int = 1) -> dict[str, Split]:
        """Splits rows, with the bias, or columns."""
        is_column = style == "column"
        names = (*self.row_names, "bias") if is_column else self.column_names
        split = Split(0, parts) if is_column else Split(1)
        return {name: split for name in names if self.stored(name) is not None}

    def why_whole(self, style: Style, size: int, parts: int = 1) -> str:
        """The reason, if parts wouldn't be whole groups of columns or rows that share a scale or a word."""
        if style == "expert":
            return "it is no mixture of experts"
        if style == "column":
            what, length, step = "outputs", self.out_features, self.rows_in_step
        else:
            what, length, step = "inputs", self.in_features, self.columns_in_step
        if length % (size * parts * step) == 0:
            return ""
        blocks = f", {size * parts} blocks of {step}" if step > 1 else ""
        return f"its {length} {what} aren't a multiple of {size * parts * step}{blocks}"

    def take_shard(self, shard: Shard) -> None:
        """As in ``QuantLayer``; in row parallelism, only one process adds the bias."""
        super().take_shard(shard)
        if shard.style == "column":
            self.out_features //= shard.size
            return
        self.in_features //= shard.size
        if shard.rank and self.bias is not None:
            self.bias = frozen(torch.zeros_like(self.bias)) if self.folds_bias else None

    def _of_nested(self, x: Any) -> Tensor:
        rows: Tensor
        if x.layout == torch.jagged:
            rows = torch.nested.nested_tensor_from_jagged(self.forward(x.values()), x.offsets(), x.lengths())
        else:
            parts = x.unbind()
            shapes = [part.shape[:-1] for part in parts]
            out = self.forward(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]))
            pieces = out.split([shape.numel() for shape in shapes])
            made = [piece.reshape(*shape, out.shape[-1]) for piece, shape in zip(pieces, shapes, strict=True)]
            rows = torch.nested.as_nested_tensor(made)
        return rows

    def take_input_scale(self, input_scale: InputScale | None, device: torch.device) -> None:
        """Sets the activation's scale, on ``device``. Raises ``ValueError`` unless it matches the scheme."""
        if self.is_static != (input_scale is not None):
            wants = "needs an input_scale" if self.is_static else "takes no input_scale"
            raise ValueError(f"scheme {self.scheme.name!r} {wants}")

    def take_outlier_columns(self, columns: Tensor | None, device: torch.device) -> None:
        """Sets which columns stay in float, on ``device``. Raises ``ValueError`` unless they match the scheme."""
        if columns is not None:
            raise ValueError(f"scheme {self.scheme.name!r} keeps no columns in float, so it takes no outlier_columns")

    def take_bias(self, bias: Tensor | None) -> None:
        """Sets the bias, after the weight, to that of the float layer."""
        if bias is not None:
            self.bias = frozen(narrowed(bias))

    def float_bias(self) -> Tensor | None:
        """The bias of the float layer."""
        return self.bias

    def dequantize(self, dtype: torch.dtype | None = None) -> Any:
        """The equivalent float layer in ``dtype``, by default the bias's, or float32. A shard raises ``ValueError``.

        It is an ``nn.Linear``, or transformers' ``Conv1D`` if this layer stands for one.
        """
        linear = self.float_linear(dtype)
        if not self.of_conv1d:
            return linear
        from transformers.pytorch_utils import Conv1D

        with torch.device("meta"):
            conv1d = Conv1D(self.out_features, self.in_features)
        conv1d.weight, conv1d.bias = nn.Parameter(linear.weight.detach().t().contiguous()), linear.bias
        return conv1d.train(self.training)

    def float_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """As ``dequantize``, but always an ``nn.Linear``."""
        self.check_is_whole()
        bias = self.float_bias()
        dtype = dtype or (torch.float32 if bias is None else bias.dtype)
        linear = nn.Linear(self.in_features, self.out_features, bias is not None, device="meta", dtype=dtype)
        parameters = self.rows_from(0, self.out_features)
        exact = self.restore_rows(parameters, torch.float64 if dtype == torch.float64 else torch.float32)
        linear.weight = nn.Parameter(exact.to(dtype))
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().to(dtype))
        return linear.train(self.training)

    def extra_repr(self) -> str:
        """Sizes and scheme, for ``print``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}, "
            f"scheme={self.scheme.name!r}"
        )


def parse_input_scale(
    value: InputScale, scheme: QuantScheme, device: torch.device | None = None, name: str = "input_scale"
) -> tuple[Tensor, Tensor]:
    """The scale (float32) and the zero point (int8), on ``device``, in the ``value`` for a static ``scheme``.

    Raises ``ValueError`` and ``TypeError``, which call it ``name``, for a value that doesn't fit the scheme.
    """
    parts = list(value) if isinstance(value, tuple | list) else [value]
    if isinstance(value, tuple | list) != scheme.has_zero_point or len(parts) != 1 + scheme.has_zero_point:
        wanted = "a pair, of a scale and a zero point" if scheme.has_zero_point else "a single number"
        raise ValueError(f"{name} is {value!r}; scheme {scheme.name!r} takes {wanted}")
    numbers = []
    for part in parts:
        if not isinstance(part, int | float | Tensor):
            raise TypeError(f"{name} is {part!r}; it must be a number")
        number = torch.as_tensor(part, dtype=torch.float32, device=device).detach()
        if number.numel() != 1:
            raise ValueError(f"{name} has shape {list(number.shape)}; it must be a single number")
        numbers.append(number.reshape(()))
    scale, zero_point = (
        numbers if scheme.has_zero_point else (*numbers, torch.zeros((), dtype=torch.float32, device="cpu"))
    )
    if scale.device.type != "meta" and not (scale > 0 and scale.isfinite()):
        raise ValueError(f"{name} is {scale.item()}; it must be finite and greater than 0")
    if zero_point.device.type != "meta" and not is_zero_point(zero_point.item()):
        raise ValueError(f"the zero point in {name} is {zero_point.item():g}; it must be {ZERO_POINTS}")
    return scale, zero_point.to(INT8.storage)


def largest(values: Tensor) -> Tensor:
    """The largest magnitude of ``values``; 1 if there are no values."""
    if not values.numel():
        return values.new_ones(())
    low, high = values.aminmax()  # needs no copy, as abs() would
    return torch.maximum(high, -low)


def linear_weight(linear: nn.Module) -> Tensor:
    """The weight ``[out_features, in_features]`` of a linear layer; transformers' ``Conv1D`` stores its transpose."""
    weight: Tensor = linear.weight  # type: ignore[assignment]
    return weight.t() if is_conv1d(linear) else weight


def is_float_linear(module: nn.Module | None) -> TypeGuard[nn.Module]:
    """Whether ``module`` is an ``nn.Linear``, or transformers' ``Conv1D``."""
    return isinstance(module, nn.Linear) or (module is not None and is_conv1d(module))


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' ``Conv1D``, a linear layer; other classes may have that name."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")
