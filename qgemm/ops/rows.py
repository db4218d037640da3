"""What is computed on rows before a product.

- ``quantize_rows(x, scale, zero_point, dtype)``: ``(q, row_scale)``.
- ``quantize_groups(x)``: ``(q, scale)``, with a scale for each 128 values of a row.
- ``activation_quantize(x, activation, gated, input_scale, dtype, prefix, up_first)``: the same, after
  ``act(gate) * up``.
- ``activate(x, activation, gated, up_first)``: ``act(gate) * up`` itself.
- ``hadamard(x)``: ``x`` times a block-diagonal Walsh-Hadamard matrix.
"""

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels import checks, dispatch
from qgemm.kernels.activations import activated
from qgemm.kernels.gating import dispatch as gating
from qgemm.kernels.hadamard import dispatch as rotation
from qgemm.kernels.reorder import dispatch as reordering
from qgemm.kernels.xielu import dispatch as parametric
from qgemm.kernels.xielu.coefficients import Coefficients
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FP8, INT8
from qgemm.numerics.integers import cdiv
from qgemm.ops.declare import NO_GRADIENT, differentiable, gradients_through, operator
from qgemm.ops.direct import concerns_gradients_alone, recall_launch, remember_launch, seen_by_others


def activation_quantize(
    x: Tensor,
    activation: str,
    gated: bool,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
    prefix: Tensor | None = None,
    up_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """``torch.ops.qgemm.activation_quantize``, bypassing the dispatcher where nothing in it needs to see the call."""
    what, tensors = ("activation_quantize", activation, gated, dtype, up_first), (x, input_scale, prefix)
    out: Any = recall_launch(what, tensors)
    if out is None and seen_by_others(x, input_scale, prefix):
        out = torch.ops.qgemm.activation_quantize(x, activation, gated, input_scale, dtype, prefix, up_first)
    elif out is None:
        out = dispatch.activation_quantize(x, activation, gated, input_scale, dtype, prefix, up_first)

        def launched() -> Any:
            from qgemm.kernels.activation import launcher

            q, row_scale = out
            return launcher.find_launch(x, activation, gated, input_scale, q, row_scale, prefix, up_first)

        remember_launch(what, tensors, out, launched)
    found: tuple[Tensor, Tensor] = out
    return found


def activate(x: Tensor, activation: str, gated: bool, up_first: bool = False) -> Tensor:
    """``torch.ops.qgemm.activate``, bypassing the dispatcher where nothing in it needs to see the call."""
    what = "activate", activation, gated, up_first
    recalled = recall_launch(what, (x,))
    if recalled is not None:
        return recalled[0]
    out: Tensor
    if seen_by_others(x):
        out = torch.ops.qgemm.activate(x, activation, gated, up_first)
        return out
    out = dispatch.activate(x, activation, gated, up_first)

    def launched() -> Any:
        from qgemm.kernels.activation import launcher

        return launcher.find_plain_launch(x, activation, gated, up_first, out)

    remember_launch(what, (x,), (out,), launched)
    return out


def gate_heads(x: Tensor, gate: Tensor, function: str) -> Tensor:
    """``x * function(gate)``, as ``kernels.gating.dispatch.gate_heads``, with less time on a GPU."""
    recalled = recall_launch(("gate_heads", function), (x, gate))
    if recalled is not None:
        return recalled[0]
    if seen_by_others(x, gate):
        return x * gating.GATES[function](gate)
    out = gating.gate_heads(x, gate, function)

    def launched() -> Any:
        from qgemm.kernels.gating import launcher

        return launcher.find_launch(x, gate, function, out)

    if gating.is_one_launch(x, gate):
        remember_launch(("gate_heads", function), (x, gate), (out,), launched)
    return out


def xielu(x: Tensor, coefficients: Coefficients) -> Tensor:
    """``kernels.xielu.dispatch.xielu``; what others see are PyTorch's operators."""
    recalled = recall_launch(("xielu",), (x, *coefficients))
    if recalled is not None:
        return recalled[0]
    if seen_by_others(x, *coefficients):
        return parametric.plain(x, coefficients)
    out = parametric.xielu(x, coefficients)

    def launched() -> Any:
        from qgemm.kernels.xielu import launcher

        return launcher.find_launch(x), (x, *coefficients, out)

    if parametric.fits(x, coefficients):
        remember_launch(("xielu",), (x, *coefficients), (out,), launched)
    return out


def hadamard(x: Tensor) -> Tensor:
    """``torch.ops.qgemm.hadamard``, bypassing the dispatcher where nothing in it needs to see the call."""
    recalled = recall_launch(("hadamard",), (x,))
    if recalled is not None:
        return recalled[0]
    out: Tensor
    if seen_by_others(x):
        out = _hadamard_with_gradients(None, x) if concerns_gradients_alone(x) else torch.ops.qgemm.hadamard(x)
        return out
    out = rotation.hadamard(x)

    def launched() -> Any:
        from qgemm.kernels.hadamard import launcher

        return launcher.find_launch(x), (x, out)

    if rotation.is_one_launch(x):
        remember_launch(("hadamard",), (x,), (out,), launched)
    return out


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """``x.index_select(-1, order)`` for a permutation ``order``, int32 ``[K]``, with less time on a GPU."""
    recalled = recall_launch(("reorder",), (x, order))
    if recalled is not None:
        return recalled[0]
    if seen_by_others(x, order):
        return x.index_select(-1, order)
    out = reordering.reorder(x, order)

    def launched() -> Any:
        from qgemm.kernels.reorder import launcher

        return launcher.find_launch(x.view(-1, x.shape[-1])), (x, order, out)

    if reordering.is_one_launch(x, order):
        remember_launch(("reorder",), (x, order), (out,), launched)
    return out


# PyTorch leaves out arguments that have their default at the end of a call, so a dtype of None never comes.
def _quantize_rows_fake(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None = None, dtype: torch.dtype = INT8.storage
) -> tuple[Tensor, Tensor]:
    checks.check_quantize_rows(x, scale, zero_point, dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


operator(
    "quantize_rows(Tensor x, Tensor? scale, Tensor? zero_point=None, ScalarType? dtype=None) -> (Tensor, Tensor)",
    compute=dispatch.quantize_rows,
    fake=_quantize_rows_fake,
    **NO_GRADIENT,  # rounding has no useful one; quant_linear treats it as the identity
)


def _quantize_groups_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    checks.check_quantize_groups(x)
    scales = (*x.shape[:-1], cdiv(x.shape[-1], BLOCK))
    return x.new_empty(x.shape, dtype=FP8.storage), x.new_empty(scales, dtype=torch.float32)


operator(
    "quantize_groups(Tensor x) -> (Tensor, Tensor)",
    compute=dispatch.quantize_groups,
    fake=_quantize_groups_fake,
    **NO_GRADIENT,
)


def _activation_quantize(
    x: Tensor,
    activation: str,
    gated: bool,
    input_scale: Tensor | None,
    dtype: torch.dtype | None = None,
    prefix: Tensor | None = None,
    up_first: bool = False,
) -> tuple[Tensor, Tensor]:
    return dispatch.activation_quantize(x, activation, gated, input_scale, dtype or INT8.storage, prefix, up_first)


def _activation_quantize_fake(
    x: Tensor,
    activation: str,
    gated: bool,
    input_scale: Tensor | None,
    dtype: torch.dtype | None = None,
    prefix: Tensor | None = None,
    up_first: bool = False,
) -> tuple[Tensor, Tensor]:
    dtype = dtype or INT8.storage
    checks.check_activation_quantize(x, activation, gated, input_scale, dtype, prefix, up_first)
    columns = (x.shape[-1] // 2 if gated else x.shape[-1]) + (0 if prefix is None else prefix.shape[-1])
    q = x.new_empty((*x.shape[:-1], columns), dtype=dtype)
    return q, x.new_empty(x.shape[:-1], dtype=torch.float32)


operator(
    "activation_quantize(Tensor x, str activation, bool gated, Tensor? input_scale, ScalarType? dtype=None, "
    "Tensor? prefix=None, bool up_first=False) -> (Tensor, Tensor)",
    compute=_activation_quantize,
    fake=_activation_quantize_fake,
    **NO_GRADIENT,
)


def _activate_fake(x: Tensor, activation: str, gated: bool, up_first: bool = False) -> Tensor:
    checks.check_activate(x, activation, gated, up_first)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2 if gated else x.shape[-1]))


def _activate_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.how = inputs
    ctx.save_for_backward(x)


def _activate_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    compute = lambda x: (activated(x, *ctx.how),)  # noqa: E731
    (found,) = gradients_through(compute, ctx.saved_tensors, [grad])
    return found, *[None for _ in ctx.how]


operator(
    "activate(Tensor x, str activation, bool gated, bool up_first=False) -> Tensor",
    compute=dispatch.activate,
    fake=_activate_fake,
    setup_context=_activate_setup,
    backward=_activate_backward,
)


def _hadamard_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor) -> tuple[Tensor]:
    return (hadamard(grad),)  # the matrix is symmetric


operator(
    "hadamard(Tensor x) -> Tensor",
    compute=rotation.hadamard,
    fake=lambda x: x.new_empty(x.shape),
    backward=_hadamard_backward,
    jvp=lambda args, tangents: torch.ops.qgemm.hadamard(tangents[0]),
    batched=(0,),
)
_hadamard_with_gradients = differentiable("hadamard", hadamard, lambda ctx, inputs, output: None, _hadamard_backward)
