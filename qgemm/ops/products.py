"""Products of two matrices.

- ``int_mm(a, b)``: ``a @ b`` in int32.
- ``scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)``: ``(a @ b) * a_scale * b_scale + bias``.
- ``matmul(a, b, bias, activation, out_dtype)``: ``activation(a @ b + bias)`` of floats.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels import checks, dispatch
from qgemm.ops.declare import operator


def _fake(check: Callable[..., None], dtype: torch.dtype | None = None) -> Callable[..., Tensor]:
    """The fake of a product whose last argument is its ``out_dtype``, unless it always returns ``dtype``."""

    def fake(a: Tensor, b: Tensor, *others: Any) -> Tensor:
        check(a, b, *others)
        return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype or others[-1] or a.dtype)

    return fake


operator(
    "int_mm(Tensor a, Tensor b) -> Tensor",
    compute=dispatch.int_mm,
    fake=_fake(checks.check_int_mm, torch.int32),
)


def _scaled_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, a_scale, b_scale, bias, _ = inputs
    ctx.save_for_backward(a, b, a_scale, b_scale, bias)


def _scaled_mm_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, a_scale, b_scale, bias = ctx.saved_tensors
    _, _, wants_a_scale, wants_b_scale, wants_bias, _ = wanted
    grad_a_scale = grad_b_scale = grad_bias = None
    if wants_a_scale or wants_b_scale:
        product = grad.float() * _sums(a, b)
        if wants_a_scale:
            by_row = (product * b_scale.reshape(1, -1)).sum(1)
            grad_a_scale = by_row.sum_to_size(a_scale.shape) if a_scale.ndim else by_row.sum()
        if wants_b_scale:
            by_column = (product * a_scale.reshape(-1, 1)).sum(0)
            grad_b_scale = by_column.sum_to_size(b_scale.shape) if b_scale.ndim else by_column.sum()
    if wants_bias:
        grad_bias = grad.float().sum(0).to(bias.dtype)
    return None, None, grad_a_scale, grad_b_scale, grad_bias, None


def _sums(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32."""
    if a.dtype == torch.int8:
        out: Tensor = torch.ops.qgemm.int_mm(a, b).float()
    else:
        out = torch.ops.qgemm.matmul(a, b, None, None, torch.float32)
    return out


def _scaled_mm_jvp(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Tensor:
    a, b, a_scale, b_scale, *_ = args
    _, _, along_a_scale, along_b_scale, along_bias, _ = tangents
    product = _sums(a, b)
    out = torch.zeros_like(product)
    if along_a_scale is not None:
        out = out + product * along_a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
    if along_b_scale is not None:
        out = out + product * a_scale.reshape(-1, 1) * along_b_scale.reshape(1, -1)
    return out if along_bias is None else out + along_bias


operator(
    "scaled_mm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype) -> Tensor",
    compute=dispatch.scaled_mm,
    fake=_fake(checks.check_scaled_mm),
    setup_context=_scaled_mm_setup,
    backward=_scaled_mm_backward,
    jvp=_scaled_mm_jvp,
)


_ACTIVATION_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, inner: torch.ops.aten.threshold_backward(grad, inner, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
}


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


def _matmul_jvp(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Tensor:
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
    # Values are independent: the derivative times the tangent is the derivative times a gradient.
    inner = torch.ops.qgemm.matmul(a, b, bias, None, torch.float32)
    return _ACTIVATION_BACKWARD[activation](out, inner)


operator(
    "matmul(Tensor a, Tensor b, Tensor? bias, str? activation, ScalarType? out_dtype) -> Tensor",
    compute=dispatch.matmul,
    fake=_fake(checks.check_matmul),
    setup_context=_matmul_setup,
    backward=_matmul_backward,
    jvp=_matmul_jvp,
)
