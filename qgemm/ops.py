"""``torch.ops.qgemm.*``: the kernels as PyTorch operators.

| operator | computes |
|---|---|
| ``quantize_rows(x, scale, zero_point)`` | ``(q, row_scale)`` |
| ``int_mm(a, b)`` | ``a @ b`` in int32 |
| ``scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)`` | ``(a @ b) * a_scale * b_scale + bias`` |
| ``matmul(a, b, bias, activation, out_dtype)`` | ``activation(a @ b + bias)`` of floats |
| ``quant_linear(x, weight, weight_scale, bias, input_scale)`` | an int8 linear layer, activations quantized within |
| ``quant_linear_asymmetric(x, weight, weight_scale, bias, input_scale, zero_point)`` | the same with a zero point |
| ``packed_linear(x, weight, scale, in_features, group_size, bias)`` | a linear layer of floats with a 4-bit weight |
| ``hadamard(x)`` | ``x`` times a block-diagonal Walsh-Hadamard matrix |
| ``quant_experts(x, top_k_index, ...)`` | a mixture of experts in int8: ``expert_ops.py`` |

Each runs on CPU and CUDA (ROCm included), traces under ``torch.compile`` and ``torch.export`` through a fake
implementation that makes the same checks, and has a gradient. ``dispatch.py`` documents arguments and numbers.

The gradient of ``quant_linear`` for ``x`` goes through the dequantized weight (rounding ``x`` counts as the identity):
``grad_x = grad_y @ (weight * weight_scale)``. Adapters on top of a frozen quantized model train with it. In forward
mode (``torch.func.jvp``) it is the same linear map. ``op_rules.py`` has what is done under autocast and ``vmap``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qgemm.kernels import checks, dispatch
from qgemm.kernels.launch.recall import recall, remember
from qgemm.kernels.linear import asymmetric
from qgemm.kernels.packed import launcher as int4
from qgemm.numerics.hadamard import hadamard
from qgemm.numerics.packing import dequantize
from qgemm.op_rules import no_tangent, register_autocast, register_autograd, register_vmap

torch.library.define("qgemm::quantize_rows", "(Tensor x, Tensor? scale, Tensor? zero_point=None) -> (Tensor, Tensor)")
torch.library.define("qgemm::int_mm", "(Tensor a, Tensor b) -> Tensor")
torch.library.define(
    "qgemm::scaled_mm",
    "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
torch.library.define(
    "qgemm::matmul",
    "(Tensor a, Tensor b, Tensor? bias, str? activation, ScalarType? out_dtype) -> Tensor",
)
torch.library.define(
    "qgemm::quant_linear",
    "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? input_scale) -> Tensor",
)
torch.library.define(
    "qgemm::quant_linear_asymmetric",
    "(Tensor x, Tensor weight, Tensor weight_scale, Tensor bias, Tensor input_scale, Tensor zero_point) -> Tensor",
)
torch.library.define(
    "qgemm::packed_linear",
    "(Tensor x, Tensor weight, Tensor scale, int in_features, int group_size, Tensor? bias) -> Tensor",
)
torch.library.define("qgemm::hadamard", "(Tensor x) -> Tensor")


for _name in ("quantize_rows", "int_mm", "scaled_mm", "matmul", "quant_linear"):
    torch.library.impl(f"qgemm::{_name}", ("cpu", "cuda"), getattr(dispatch, _name))
torch.library.impl("qgemm::quant_linear_asymmetric", ("cpu", "cuda"), asymmetric.quant_linear_asymmetric)
torch.library.impl("qgemm::packed_linear", ("cpu", "cuda"), int4.packed_linear)
torch.library.impl("qgemm::hadamard", ("cpu", "cuda"), hadamard)


def quant_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None
) -> Tensor:
    """``torch.ops.qgemm.quant_linear``, for less host time where it can be.

    The way through the dispatcher to a function in Python and back takes about 7 us of a call. Where nobody on that way
    would see it, the function is called directly, and on a GPU what it finds out about a call is remembered for others
    like it.
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.qgemm.quant_linear(x, weight, weight_scale, bias, input_scale)
        return out
    run = recall(x, weight, weight_scale, bias, input_scale)
    if run is None:
        if seen_by_others(x, weight, weight_scale, bias, input_scale):
            out = torch.ops.qgemm.quant_linear(x, weight, weight_scale, bias, input_scale)
            return out
        if not x.is_cuda or x.is_neg():
            return dispatch.quant_linear(x, weight, weight_scale, bias, input_scale)
        plan = dispatch.plan_quant_linear(x, weight, weight_scale, bias, input_scale)
        if plan.aligned:
            remember(plan, x, weight, weight_scale, bias, input_scale)
        run = plan
    return run(x, weight, weight_scale, bias, input_scale)


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def check_is_tensor(x: Any) -> None:
    """Raises ``TypeError`` for the input of a layer that is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"the layer's input is a {type(x).__name__}; it takes a tensor")


def seen_by_others(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None
) -> bool:
    """Whether a call concerns more than the operator's CPU or CUDA implementation; for ``expert_ops`` too.

    That is: gradients, subclasses of Tensor, modes, ``torch.func``, autocast, tracing, a running profiler.

    Raises ``TypeError`` for an ``x`` that is no tensor.
    """
    check_is_tensor(x)
    return (
        not (x.is_cuda or x.is_cpu)
        or not (type(x) in _PLAIN and type(weight) in _PLAIN and type(weight_scale) in _PLAIN)
        or not (type(bias) in _PLAIN and type(input_scale) in _PLAIN)
        or (
            torch.is_grad_enabled()
            and (
                x.requires_grad
                or weight_scale.requires_grad
                or (bias is not None and bias.requires_grad)
                or (input_scale is not None and input_scale.requires_grad)
            )
        )
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
        or torch._C._is_tracing()
        or torch._C._autograd._profiler_enabled()
    )


@torch.library.register_fake("qgemm::quantize_rows")
def _(x: Tensor, scale: Tensor | None, zero_point: Tensor | None = None) -> tuple[Tensor, Tensor]:
    checks.check_quantize_rows(x, scale, zero_point)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("qgemm::int_mm")
def _(a: Tensor, b: Tensor) -> Tensor:
    checks.check_int_mm(a, b)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.int32)


@torch.library.register_fake("qgemm::scaled_mm")
def _(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    checks.check_scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@torch.library.register_fake("qgemm::matmul")
def _(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    checks.check_matmul(a, b, bias, activation, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype)


@torch.library.register_fake("qgemm::quant_linear")
def _(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None) -> Tensor:
    checks.check_quant_linear(x, weight, weight_scale, bias, input_scale)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.register_fake("qgemm::quant_linear_asymmetric")
def _(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, input_scale: Tensor, zero_point: Tensor) -> Tensor:
    asymmetric.check_quant_linear_asymmetric(x, weight, weight_scale, bias, input_scale, zero_point)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.register_fake("qgemm::packed_linear")
def _(x: Tensor, weight: Tensor, scale: Tensor, in_features: int, group_size: int, bias: Tensor | None) -> Tensor:
    int4.check_packed_linear(x, weight, scale, in_features, group_size, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.register_fake("qgemm::hadamard")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _quantize_rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # Rounding has no useful gradient; quant_linear takes it for the identity.
    ctx.mark_non_differentiable(*output)


def _quantize_rows_backward(ctx: Any, wanted: tuple[bool, ...], *grads: Tensor) -> tuple[None, None, None]:
    return None, None, None


def _scaled_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, a_scale, b_scale, bias, _ = inputs
    ctx.save_for_backward(a, b, a_scale, b_scale, bias)


def _scaled_mm_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, a_scale, b_scale, bias = ctx.saved_tensors
    _, _, wants_a_scale, wants_b_scale, wants_bias, _ = wanted
    grad_a_scale = grad_b_scale = grad_bias = None
    if wants_a_scale or wants_b_scale:
        product = grad.float() * torch.ops.qgemm.int_mm(a, b).float()
        if wants_a_scale:
            by_row = (product * b_scale.reshape(1, -1)).sum(1)
            grad_a_scale = by_row.sum_to_size(a_scale.shape) if a_scale.ndim else by_row.sum()
        if wants_b_scale:
            by_column = (product * a_scale.reshape(-1, 1)).sum(0)
            grad_b_scale = by_column.sum_to_size(b_scale.shape) if b_scale.ndim else by_column.sum()
    if wants_bias:
        grad_bias = grad.float().sum(0).to(bias.dtype)
    return None, None, grad_a_scale, grad_b_scale, grad_bias, None


def _matmul_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, ctx.activation, _ = inputs
    ctx.save_for_backward(a, b, bias)


def _matmul_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, bias = ctx.saved_tensors
    wants_a, wants_b, wants_bias, *_ = wanted
    grad = grad.float()
    if ctx.activation is not None:
        inner = torch.ops.qgemm.matmul(a, b, bias, None, torch.float32)
        grad = _ACTIVATION_BACKWARD[ctx.activation](grad, inner)
    grad_a = (grad @ b.float().t()).to(a.dtype) if wants_a else None
    grad_b = (a.float().t() @ grad).to(b.dtype) if wants_b else None
    grad_bias = grad.sum(0).to(bias.dtype) if wants_bias else None
    return grad_a, grad_b, grad_bias, None, None


_ACTIVATION_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, inner: torch.ops.aten.threshold_backward(grad, inner, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
}


def _quant_linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, weight_scale, bias, *_ = inputs
    ctx.x_dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(weight, weight_scale)


def _quant_linear_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, weight_scale = ctx.saved_tensors
    wants_x, _, wants_weight_scale, wants_bias, wants_input_scale, *rest = wanted
    if wants_weight_scale or wants_input_scale:
        raise RuntimeError("quant_linear has gradients for x and bias only; set requires_grad=False on its scales")
    grad_x = grad_bias = None
    if wants_x:
        # The weight is scaled, not the gradient: that would underflow in float16.
        grad_x = grad @ (weight * weight_scale.reshape(-1, 1)).to(ctx.x_dtype)
    if wants_bias:
        grad_bias = grad.float().sum_to_size(weight.shape[0]).to(ctx.bias_dtype)
    return grad_x, None, None, grad_bias, None, *(None for _ in rest)


def _packed_linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, scale, ctx.in_features, ctx.group_size, bias = inputs
    ctx.x_dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(weight, scale)


def _packed_linear_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, scale = ctx.saved_tensors
    wants_x, _, wants_scale, _, _, wants_bias = wanted
    if wants_scale:
        raise RuntimeError("packed_linear has gradients for x and bias only; set requires_grad=False on its scale")
    grad_x = grad_bias = None
    if wants_x:
        grad_x = grad @ dequantize(weight, scale, ctx.group_size, ctx.in_features, ctx.x_dtype)
    if wants_bias:
        grad_bias = grad.float().sum_to_size(weight.shape[0]).to(ctx.bias_dtype)
    return grad_x, None, None, None, None, grad_bias


def _hadamard_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _hadamard_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor]:
    return (torch.ops.qgemm.hadamard(grad),)  # the matrix is symmetric


# In forward mode: the derivative in the direction of the arguments' tangents. Those of ints and sizes are None.


def _quant_linear_tangent(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Tensor:
    x, weight, weight_scale, *_ = args
    along_x, _, along_scale, along_bias, along_input_scale, *_ = tangents
    if along_scale is not None or along_input_scale is not None:
        raise RuntimeError("quant_linear has derivatives for x and bias only; give no tangents for its scales")
    return _linear_tangent(along_x, along_bias, (weight * weight_scale.reshape(-1, 1)).to(x.dtype), x)


def _packed_linear_tangent(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Tensor:
    x, weight, scale, in_features, group_size, _ = args
    along_x, _, along_scale, _, _, along_bias = tangents
    if along_scale is not None:
        raise RuntimeError("packed_linear has derivatives for x and bias only; give no tangent for its scale")
    return _linear_tangent(along_x, along_bias, dequantize(weight, scale, group_size, in_features, x.dtype), x)


def _linear_tangent(along_x: Tensor | None, along_bias: Tensor | None, weight: Tensor, x: Tensor) -> Tensor:
    along = x.new_zeros((*x.shape[:-1], weight.shape[0])) if along_x is None else along_x @ weight.t()
    return along if along_bias is None else along + along_bias


def _hadamard_tangent(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Tensor:
    out: Tensor = torch.ops.qgemm.hadamard(tangents[0])
    return out


def _scaled_mm_tangent(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Tensor:
    a, b, a_scale, b_scale, *_ = args
    _, _, along_a_scale, along_b_scale, along_bias, _ = tangents
    product = torch.ops.qgemm.int_mm(a, b).float()
    out = torch.zeros_like(product)
    if along_a_scale is not None:
        out = out + product * along_a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
    if along_b_scale is not None:
        out = out + product * a_scale.reshape(-1, 1) * along_b_scale.reshape(1, -1)
    return out if along_bias is None else out + along_bias


def _matmul_tangent(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Tensor:
    a, b, bias, activation, _ = args
    along_a, along_b, along_bias, *_ = tangents
    out: Tensor = a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float32)
    if along_a is not None:
        out = out + along_a.float() @ b.float()
    if along_b is not None:
        out = out + a.float() @ along_b.float()
    if along_bias is not None:
        out = out + along_bias
    if activation is None:
        return out
    # Of one value each: its derivative times the tangent is what it is times a gradient.
    inner = torch.ops.qgemm.matmul(a, b, bias, None, torch.float32)
    along: Tensor = _ACTIVATION_BACKWARD[activation](out, inner)
    return along


for _name, _setup, _backward, _tangent in (
    ("quantize_rows", _quantize_rows_setup, _quantize_rows_backward, no_tangent("quantize_rows")),
    ("scaled_mm", _scaled_mm_setup, _scaled_mm_backward, _scaled_mm_tangent),
    ("matmul", _matmul_setup, _matmul_backward, _matmul_tangent),
    ("quant_linear", _quant_linear_setup, _quant_linear_backward, _quant_linear_tangent),
    ("quant_linear_asymmetric", _quant_linear_setup, _quant_linear_backward, _quant_linear_tangent),
    ("packed_linear", _packed_linear_setup, _packed_linear_backward, _packed_linear_tangent),
    ("hadamard", _hadamard_setup, _hadamard_backward, _hadamard_tangent),
):
    register_autograd(_name, _setup, _backward, _tangent)
for _name in ("quant_linear", "quant_linear_asymmetric", "packed_linear"):
    register_autocast(_name)
for _name in ("quant_linear", "quant_linear_asymmetric", "packed_linear", "hadamard"):
    register_vmap(_name)
