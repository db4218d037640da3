"""Linear layers with a frozen weight.

- ``quant_linear(x, weight, weight_scale, bias, input_scale, residual=None)``: in int8 or fp8; quantizes activations
  itself, and adds a residual if there is one.
- ``quant_linear_asymmetric(x, weight, weight_scale, bias, input_scale, zero_point)``: the same with a zero point.
- ``block_scaled_linear(x, weight, weight_scale, bias, residual=None)``: in fp8, with a scale for each 128 x 128 block
  of the weight.
- ``weight_only_linear(x, weight, scale, zero_point, global_scale, input_order, bias, in_features, format, group_size,
  int8_activations=False, step=None, residual=None)``: in float, with a quantized weight of 4 or 8 bits.
- ``multiply(q, row_scale, weight, weight_scale, bias, residual, out_dtype)``: ``quant_linear`` for rows that are
  already quantized, plus a residual. Int8 rows have no gradient; only the bias and the residual have.

In the others, the gradient of ``x`` uses the dequantized weight (rounding ``x`` counts as the identity):
``grad_x = grad_y @ (weight * weight_scale)``. Adapters on top of a frozen quantized model train with it. In forward
mode (``torch.func.jvp``) it is the same linear map.

On Hopper a weight and its scales are loaded while preceding kernels in the stream may still run. If a kernel of qgemm
such as ``quantize_rows`` wrote them, the caller must wait for it (``torch.cuda.synchronize()``) before the first
product. Layers do so when they are made; ``scaled_mm`` waits unless called with ``constant_b``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels import checks, dispatch
from qgemm.kernels.activations import Gates
from qgemm.kernels.launch.plans import Run, recall, remember
from qgemm.kernels.rows import QuantizedRows
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.weight_only import dispatch as weight_only
from qgemm.ops.declare import differentiable, operator, to_autocast_dtype, without_autocast
from qgemm.ops.direct import (
    concerns_gradients_alone,
    is_under_autocast,
    recall_launch,
    remember_launch,
    seen_by_others,
)
from qgemm.ops.float_weight import float_weight
from qgemm.ops.rows import activate, reorder


def quant_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """``torch.ops.qgemm.quant_linear``, with less host time where possible.

    If nothing in the dispatcher needs to see the call, the implementation is called directly, and what was computed
    about the call is remembered for similar ones.
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.qgemm.quant_linear(x, weight, weight_scale, bias, input_scale, residual)
        return out
    run = recall(x, weight, weight_scale, bias, input_scale, residual)
    if run is not None:
        recalled = run(x, weight, weight_scale, bias, input_scale, residual)
        if recalled is not None:
            return recalled
    if is_under_autocast(x):
        x = to_autocast_dtype(x)
        with without_autocast():
            return quant_linear(x, weight, weight_scale, bias, input_scale, residual)
    tensors = x, weight, weight_scale, bias, input_scale, residual
    if seen_by_others(*tensors):
        if concerns_gradients_alone(*tensors):
            out = _quant_linear_with_gradients(None, *tensors)
            run = _recall_without_gradients(*tensors)
            remember(partial(_quant_linear_with_gradients, run), *tensors, differentiates=True)
            return out
        out = torch.ops.qgemm.quant_linear(x, weight, weight_scale, bias, input_scale, residual)
        return out
    return dispatch.quant_linear(x, weight, weight_scale, bias, input_scale, residual, recallable=True)


def weight_only_linear(x: Tensor, weight: ScaledWeight, residual: Tensor | None = None) -> Tensor:
    """``torch.ops.qgemm.weight_only_linear``, with less host time where possible, as in ``quant_linear``."""
    out: Tensor
    if torch.compiler.is_compiling() or (weight.input_order is not None and not _fits_order(x, weight)):
        out = torch.ops.qgemm.weight_only_linear(x, *weight, residual)
        return out
    if weight.input_order is not None:
        x, weight = _in_order(x, weight)
    values, scale, zero_point, global_scale, _, bias = weight[:6]
    step = weight.step
    other, what = (zero_point, weight[6:10]) if step is None else (step, (*weight[6:10], "step"))
    other = other if global_scale is None else global_scale
    run = recall(x, values, scale, bias, other, residual, what)
    if run is not None:
        recalled = run(x, values, scale, bias, other, residual)
        if recalled is not None:
            return recalled
    if is_under_autocast(x):
        x = to_autocast_dtype(x)
        with without_autocast():
            return weight_only_linear(x, weight, residual)
    tensors = x, values, scale, bias, other, residual
    if seen_by_others(*tensors):
        if concerns_gradients_alone(*tensors):
            out = _weight_only_linear_with_gradients(None, x, *weight, residual)
            run = _recall_without_gradients(*tensors, what)
            remember(_with_gradients_of(weight, run), *tensors, what, differentiates=True)
            return out
        out = torch.ops.qgemm.weight_only_linear(x, *weight, residual)
        return out
    return weight_only.weight_only_linear(x, weight, residual, recallable=True)


def weight_only_activated(x: Tensor, weight: ScaledWeight, gates: Gates) -> Tensor:
    """``activate(weight_only_linear(x, weight), ...)``, the same bits, by one kernel where one computes that.

    ``weight``: its outputs are as many gates as ups, by ``gates`` which of them first.
    """
    out = None
    if not torch.compiler.is_compiling() and not weight.int8_activations:
        if _fits_order(x, weight):
            x, weight = _in_order(x, weight)
        other = weight.zero_point if weight.global_scale is None else weight.global_scale
        tensors = x, weight.values, weight.scale, weight.bias, other
        run = None if weight.input_order is not None else recall(*tensors, what=(*weight[6:10], gates))
        if run is not None:
            out = run(*tensors)
        elif weight.input_order is None and not seen_by_others(*tensors):
            out = weight_only.weight_only_activated(x, weight, gates)
    return activate(weight_only_linear(x, weight), gates.activation, True, gates.up_first) if out is None else out


def _fits_order(x: Tensor, weight: ScaledWeight) -> bool:
    """Whether ``weight`` has an order of its columns, which those of ``x`` can be brought into."""
    order = weight.input_order
    if order is None or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return x.layout == torch.strided and x.shape[-1:] == order.shape and x.device == order.device


def _in_order(x: Tensor, weight: ScaledWeight) -> tuple[Tensor, ScaledWeight]:
    """``x`` with its columns in the order of the weight's, and the weight without that order."""
    assert weight.input_order is not None
    return reorder(x, weight.input_order), ScaledWeight._make((*weight[:4], None, *weight[5:]))


def _recall_without_gradients(*call: Any) -> Run | None:
    """What such a call recalls where no gradients are recorded, if one was made there before."""
    with torch.no_grad():
        return recall(*call)


def _with_gradients_of(weight: ScaledWeight, run: Run | None) -> Callable[..., Tensor]:
    """``_weight_only_linear_with_gradients`` for the arguments that ``recall`` knows weights like this one by.

    ``run``: what such a call recalls without gradients.
    """
    numbers, has_step, has_unit = weight[6:10], weight.step is not None, weight.global_scale is not None

    def recalled(*fields: Any) -> Tensor | None:
        assert run is not None
        x, values, scale, zero_point, unit, _, bias, *_, step, residual = fields
        return run(x, values, scale, bias, step if has_step else unit if has_unit else zero_point, residual)

    def with_gradients(
        x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, other: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        step = other if has_step else None
        unit = other if has_unit else None
        zero_point = None if has_step or has_unit else other
        fields = x, values, scale, zero_point, unit, None, bias, *numbers, step, residual
        return _weight_only_linear_with_gradients(None if run is None else recalled, *fields)

    return with_gradients


def block_scaled_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """``torch.ops.qgemm.block_scaled_linear``, with less host time where possible, as in ``quant_linear``."""
    out: Tensor
    if torch.compiler.is_compiling():
        out = torch.ops.qgemm.block_scaled_linear(x, weight, weight_scale, bias, residual)
        return out
    run = recall(x, weight, weight_scale, bias, None, residual, "blocks")
    if run is not None:
        recalled = run(x, weight, weight_scale, bias, None, residual)
        if recalled is not None:
            return recalled
    if is_under_autocast(x):
        x = to_autocast_dtype(x)
        with without_autocast():
            return block_scaled_linear(x, weight, weight_scale, bias, residual)
    tensors = x, weight, weight_scale, bias, None, residual
    if seen_by_others(*tensors):
        if concerns_gradients_alone(*tensors):
            out = _block_scaled_linear_with_gradients(None, x, weight, weight_scale, bias, residual)
            run = _recall_without_gradients(*tensors, "blocks")
            remember(_with_gradients_of_blocks(run), *tensors, "blocks", differentiates=True)
            return out
        out = torch.ops.qgemm.block_scaled_linear(x, weight, weight_scale, bias, residual)
        return out
    return dispatch.block_scaled_linear(x, weight, weight_scale, bias, residual, recallable=True)


def _with_gradients_of_blocks(run: Run | None) -> Callable[..., Tensor]:
    """As ``_with_gradients_of``."""

    def recalled(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, added: Tensor | None) -> Tensor | None:
        assert run is not None
        return run(x, weight, scale, bias, None, added)

    def with_gradients(x: Tensor, weight: Tensor, scale: Tensor, bias: Any, none: None, added: Any) -> Tensor:
        return _block_scaled_linear_with_gradients(None if run is None else recalled, x, weight, scale, bias, added)

    return with_gradients


def multiply(
    q: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``torch.ops.qgemm.multiply``, bypassing the dispatcher where nothing in it needs to see the call.

    Returns ``out_dtype [..., N]`` for int8 ``q [..., K]`` with float32 ``row_scale [...]``, as ``quantize_rows`` and
    its fused forms return them; ``weight`` int8 ``[N, K]``, ``weight_scale`` float32 ``[N]``, ``bias`` float ``[N]``.
    ``residual``: ``out_dtype [..., N]``, added to the rounded product.
    """
    what, tensors = ("multiply", out_dtype), (q, weight, weight_scale, row_scale, bias, residual)
    recalled = recall_launch(what, tensors)
    if recalled is not None:
        return recalled[0]
    out: Tensor
    if seen_by_others(q, row_scale, weight, weight_scale, bias, residual):
        out = torch.ops.qgemm.multiply(q, row_scale, weight, weight_scale, bias, residual, out_dtype)
        return out
    out = _multiply(q, row_scale, weight, weight_scale, bias, residual, out_dtype)

    def launched() -> Any:
        from qgemm.kernels.gemm import launcher

        return launcher.find_launch(q.contiguous(), row_scale.contiguous(), *tensors[1:3], bias, residual, out)

    remember_launch(what, tensors, (out,), launched)
    return out


def _multiply(
    q: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    checks.check_multiply(q, row_scale, weight, weight_scale, bias, residual, out_dtype)
    rows = QuantizedRows(q.contiguous(), row_scale.contiguous())
    return dispatch.multiply(rows, weight, weight_scale, bias, out_dtype, residual)


def _declare_layer(
    schema: str,
    compute: Callable[..., Tensor],
    check: Callable[..., None],
    stored: Callable[..., ScaledWeight],
    *,
    bias_at: int,
    residual_at: int | None = None,
    weight_at: slice = slice(1, 3),
    sizes: slice = slice(0),
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Declares a layer of ``(x, weight, scale, ...)``, with derivatives for ``x``, its bias and its residual.

    Returns what makes a function that bypasses the dispatcher ``differentiable``, with the layer's gradients.

    ``bias_at``, ``residual_at``: where those are among the arguments; a residual may be left out. ``check(*arguments)``
    raises for what ``compute`` can't take. ``stored(weight, scale, *others, *sizes)``: the weight as one value, from
    the tensors at ``weight_at`` and the numbers at ``sizes``.
    """
    name = schema.split("(")[0]

    def fake(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        check(x, weight, *others)
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    def check_others(wanted: list[bool], message: str) -> None:
        if any(each for at, each in enumerate(wanted) if at not in (0, bias_at, residual_at)):
            raise RuntimeError(f"{name} has {message}")

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x = inputs[0]
        ctx.x_dtype, ctx.bias_dtype = x.dtype, getattr(inputs[bias_at], "dtype", None)
        ctx.sizes = inputs[sizes]
        ctx.save_for_backward(*inputs[weight_at])

    def backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> list[Tensor | None]:
        check_others(list(wanted), "gradients for x and bias only; set requires_grad=False on its weight and scales")
        weight, *others = ctx.saved_tensors
        grads: list[Tensor | None] = [None] * len(wanted)
        if wanted[0]:
            # The weight is scaled, not the gradient: that would underflow in float16.
            grads[0] = grad @ float_weight(stored(weight, *others, *ctx.sizes), ctx.x_dtype)
        if wanted[bias_at]:
            grads[bias_at] = grad.float().sum_to_size(weight.shape[0]).to(ctx.bias_dtype)
        if residual_at is not None and True in wanted[residual_at:]:
            grads[residual_at] = grad
        return grads

    def jvp(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Tensor:
        has_tangent = [each is not None for each in tangents]
        check_others(has_tangent, "derivatives for x and bias only; give no tangents for its scales")
        x, weight, *_ = args
        along_x, along_bias = tangents[0], tangents[bias_at]
        along: Tensor
        if along_x is None:
            along = x.new_zeros((*x.shape[:-1], weight.shape[0]))
        else:
            along = along_x @ float_weight(stored(*args[weight_at], *args[sizes]), x.dtype).t()
        for other in (along_bias, *(tangents[residual_at:] if residual_at is not None else ())):
            along = along if other is None else along + other
        return along

    operator(
        schema,
        compute=compute,
        fake=fake,
        setup_context=setup_context,
        backward=backward,
        jvp=jvp,
        autocast=True,
        batched=(0,) if residual_at is None else (0, residual_at),
    )
    return partial(differentiable, name, setup_context=setup_context, backward=backward)


def _of_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(x, weight, residual)`` for the operator's arguments: the fields of ``weight`` one by one."""

    def run(x: Tensor, *arguments: Any) -> Any:
        fields = len(ScaledWeight._fields)
        return function(x, ScaledWeight(*arguments[:fields]), *arguments[fields:])

    return run


_quant_linear_with_gradients = _declare_layer(
    "quant_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? input_scale, "
    "Tensor? residual=None) -> Tensor",
    dispatch.quant_linear,
    checks.check_quant_linear,
    ScaledWeight.of_rows,
    bias_at=3,
    residual_at=5,
)(quant_linear)
_declare_layer(
    "quant_linear_asymmetric(Tensor x, Tensor weight, Tensor weight_scale, Tensor bias, Tensor input_scale, "
    "Tensor zero_point) -> Tensor",
    dispatch.quant_linear_asymmetric,
    checks.check_quant_linear_asymmetric,
    ScaledWeight.of_rows,
    bias_at=3,
)
_block_scaled_linear_with_gradients = _declare_layer(
    "block_scaled_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? residual=None) -> Tensor",
    dispatch.block_scaled_linear,
    checks.check_block_scaled_linear,
    ScaledWeight.of_blocks,
    bias_at=3,
    residual_at=4,
)(block_scaled_linear)
_weight_only_linear_with_gradients = _declare_layer(
    "weight_only_linear(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, Tensor? global_scale, "
    "Tensor? input_order, Tensor? bias, int in_features, str format, int group_size, bool int8_activations=False, "
    "Tensor? step=None, Tensor? residual=None) -> Tensor",
    _of_value(weight_only.weight_only_linear),
    _of_value(checks.check_weight_only_linear),
    ScaledWeight.without_bias,
    bias_at=6,
    residual_at=12,
    weight_at=slice(1, 6),
    sizes=slice(7, 10),
)(_of_value(weight_only_linear))


def _multiply_fake(q: Tensor, row_scale: Tensor, weight: Tensor, *others: Any) -> Tensor:
    checks.check_multiply(q, row_scale, weight, *others)
    return q.new_empty((*q.shape[:-1], weight.shape[0]), dtype=others[-1])


def _multiply_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.bias_dtype, ctx.columns = getattr(inputs[4], "dtype", None), output.shape[-1]


def _multiply_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    *others, wants_bias, wants_residual, _ = wanted
    if any(others):
        raise RuntimeError("multiply has gradients for bias and residual only; set requires_grad=False on its scales")
    grad_bias = grad.float().sum_to_size(ctx.columns).to(ctx.bias_dtype) if wants_bias else None
    return None, None, None, None, grad_bias, grad if wants_residual else None, None


operator(
    "multiply(Tensor q, Tensor row_scale, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? residual, "
    "ScalarType out_dtype) -> Tensor",
    compute=_multiply,
    fake=_multiply_fake,
    setup_context=_multiply_setup,
    backward=_multiply_backward,
)
