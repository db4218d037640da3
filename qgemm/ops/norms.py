"""Norms before quantized layers, including the residual that is added first.

- ``norm_quantize(x, weight, bias, norm, eps, input_scale, dtype)``: ``(q, row_scale)`` of ``norm(x)``.
- ``add_norm_quantize(x, residual, branch_weight, weight, bias, norm, eps, input_scale, dtype, gate, factor)``:
  ``(total, q, row_scale)``, with ``total = residual + x``, or ``residual + gate * x``, or ``residual + factor * x``.
- ``post_norm(x, residual, weight, bias, norm, eps)``: ``norm(residual + x)``; ``post_norm_quantize``, which also has
  ``input_scale`` and ``dtype``: ``(normed, q, row_scale)``, with its rows quantized too.
- ``add_norm(x, residual, branch_weight, weight, bias, norm, eps, gate, factor, total_factor)``: ``(total,
  norm(total))`` as floats, where ``total_factor`` multiplies the total. An operator may not return its input, nor one
  tensor twice; so ``total`` is an empty tensor, ``[0]``, if it would be ``x``, and so is the second output without
  ``weight``.

``dispatch.py`` documents arguments and numbers; ``norm`` and ``eps`` are the fields of a ``Norm``. Floats have
gradients for everything that they are computed from, quantized rows have none: a block that is trained calls its float
modules.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels import checks, dispatch
from qgemm.kernels.norms import Norm, NormCall, adds_to, of_samples
from qgemm.numerics.formats import INT8, OPERANDS
from qgemm.ops.declare import NO_GRADIENT, operator
from qgemm.ops.direct import recall_launch, remember_launch, seen_by_others


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
) -> tuple[Tensor, Tensor]:
    """``torch.ops.qgemm.norm_quantize``, bypassing the dispatcher where nothing in it needs to see the call."""
    tensors = x, None, None, weight, bias, input_scale, None, None
    out: tuple[Tensor, Tensor] = _by_shortest_way(("norm_quantize", norm, dtype), tensors, (x, weight, bias))
    return out


def add_norm_quantize(
    x: Tensor,
    residual: Tensor,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
    gate: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.qgemm.add_norm_quantize``, bypassing the dispatcher where nothing in it needs to see the call."""
    tensors = x, residual, branch_weight, weight, bias, input_scale, gate, None
    what = "add_norm_quantize", norm, dtype, factor
    out: tuple[Tensor, Tensor, Tensor] = _by_shortest_way(what, tensors, tensors[:5])
    return out


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    gate: Tensor | None = None,
    factor: float = 1.0,
    total_factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``dispatch.add_norm``, called through ``torch.ops.qgemm.add_norm`` if the dispatcher needs to see the call."""
    what = "add_norm", norm, None, factor
    tensors = x, residual, branch_weight, weight, bias, None, gate, total_factor
    adds = adds_to(residual, branch_weight, gate, factor, total_factor)
    made = recall_launch(what, tensors)
    if made is not None:
        total = made[0] if adds else x
        return total, total if weight is None else made[-1]
    if seen_by_others(*tensors):
        total, normed = torch.ops.qgemm.add_norm(*tensors[:5], norm.kind, norm.eps, gate, factor, total_factor)
        total = total if adds else x
        return total, total if weight is None else normed
    total, normed = dispatch.add_norm(x, residual, branch_weight, weight, bias, norm, gate, factor, total_factor)
    outputs = total if adds else None, None if weight is None else normed, None, None
    made = tuple(each for each in outputs if each is not None)
    if made:
        remember_launch(what, tensors, made, lambda: _find_launch(tensors, what, outputs))
    return total, normed


def post_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    """``torch.ops.qgemm.post_norm``, bypassing the dispatcher where nothing in it needs to see the call."""
    tensors = x, residual, None, weight, bias, None, None, None
    out: Tensor = _by_shortest_way(("post_norm", norm), tensors, (x, residual, weight, bias))
    return out


def post_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = INT8.storage,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.qgemm.post_norm_quantize``, bypassing the dispatcher where nothing in it needs to see the call."""
    tensors, what = (x, residual, None, weight, bias, input_scale, None, None), ("post_norm_quantize", norm, dtype)
    out: tuple[Tensor, Tensor, Tensor] = _by_shortest_way(what, tensors, (x, residual, weight, bias))
    return out


_OUTPUTS = {
    "norm_quantize": (None, None, 0, 1),
    "add_norm_quantize": (0, None, 1, 2),
    "add_norm": (0, 1, None, None),
    "post_norm": (None, 0, None, None),
    "post_norm_quantize": (None, 0, 1, 2),
}
"""The indices of an operator's outputs: the total, the normed total, its rows and their scales; None if missing."""
_OPERANDS = ("residual", "branch_weight", "weight", "bias")

_Tensors = tuple[Tensor | None, ...]


def _by_shortest_way(what: tuple[Any, ...], tensors: _Tensors, arguments: tuple[Any, ...]) -> Any:
    """Calls an operator by the way that takes the host the least time; returns what the operator returns.

    ``what``: its name, the norm, the dtype of rows if it makes any, and the factor of what is added if there may be
    one. ``tensors``: ``x``, the residual, the branch's weight, weight, bias, a static scale, a gate and a factor of the
    total. ``arguments``: those of them before the norm, in the operator's order.
    """
    made = recall_launch(what, tensors)
    name, norm, *others = what
    dtype, factor = others[:1], others[1:]
    if made is None:
        gate = tensors[6:7] if name == "add_norm_quantize" else ()
        scale = (tensors[5], *dtype, *gate, *factor) if dtype else ()
        if seen_by_others(*tensors):  # type: ignore[arg-type]
            return getattr(torch.ops.qgemm, name)(*arguments, norm.kind, norm.eps, *scale)
        out = getattr(dispatch, name)(*arguments, norm, *scale)
        made = out if isinstance(out, tuple) else (out,)

        outputs = tuple(None if place is None else made[place] for place in _OUTPUTS[name])
        remember_launch(what, tensors, made, lambda: _find_launch(tensors, what, outputs))
    return made if dtype else made[0]


def _find_launch(tensors: _Tensors, what: tuple[Any, ...], outputs: Any) -> Any:
    """The kernel's launch for such a call, and its tensors. ``outputs``: total, normed, rows and their scales."""
    from qgemm.kernels.norm import launcher

    x, residual, branch_weight, weight, bias, input_scale, gate, total_factor = tensors
    assert x is not None
    (_, norm, *others), vectors = what, (branch_weight, gate, weight, bias)
    factor = others[1] if len(others) > 1 else 1.0
    call = NormCall(x, residual, *vectors, norm, input_scale, None, factor, total_factor)
    return launcher.find_launch(call, outputs)


def _post_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The ``setup_context`` of ``post_norm`` and ``post_norm_quantize``."""
    x, residual, weight, _, kind, eps, *_ = inputs
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(*output[1:])
    ctx.norm = Norm(kind, eps)
    ctx.save_for_backward(x, residual, weight)


def _post_backward(ctx: Any, wanted: tuple[bool, ...], grad: Tensor, *others: Any) -> Any:
    x, residual, weight = ctx.saved_tensors
    grad, grad_weight, grad_bias = _norm_backward(ctx.norm, residual + x, weight, grad)
    grads = (grad, grad, grad_weight, grad_bias)
    found = [g if w else None for g, w in zip(grads, wanted, strict=False)]  # autograd rounds them
    return *found, *[None] * (len(wanted) - len(found))


def _sum_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The ``setup_context`` of ``add_norm_quantize`` and ``add_norm``."""
    x, residual, branch_weight, weight, _, kind, eps, *rest = inputs
    total, *rows = output
    ctx.quantizes = rows[0].dtype in OPERANDS
    # Behind a static scale and a dtype; PyTorch leaves out the last ones that are as by default.
    given = rest[2:] if ctx.quantizes else rest
    values: Any = (*given, *(None, 1.0, None)[len(given) :])
    gate, ctx.factor, total_factor = values
    if ctx.quantizes:
        ctx.mark_non_differentiable(*rows)
        weight = None
    ctx.norm = Norm(kind, eps)
    ctx.adds = adds_to(residual, branch_weight, gate, ctx.factor, total_factor)
    own = residual if total_factor is not None else None
    ctx.save_for_backward(x, own, branch_weight, weight, total if ctx.adds else x, gate, total_factor)


def _sum_backward(ctx: Any, wanted: tuple[bool, ...], grad_total: Tensor, grad_normed: Tensor, *others: Any) -> Any:
    x, residual, branch_weight, weight, total, gate, total_factor = ctx.saved_tensors
    grad = grad_total.float() if ctx.adds else torch.zeros_like(x, dtype=torch.float32)
    grad_branch_weight: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None
    if weight is not None:
        through, grad_weight, grad_bias = _norm_backward(ctx.norm, total, weight, grad_normed)
        grad = grad + through
    grad_total_factor: Tensor | None = None
    if total_factor is not None:
        added = NormCall(x, residual, branch_weight, gate, None, None, ctx.norm, factor=ctx.factor).total()
        grad, grad_total_factor = grad * total_factor, (grad * added).sum().view(1)
    grad_x, grad_gate = grad if ctx.factor == 1.0 else grad * ctx.factor, None
    if gate is not None:
        by_sample = of_samples(gate, x)
        grad_x, grad_gate = grad * by_sample, (grad * x).sum_to_size(by_sample.shape).view(gate.shape)
    if branch_weight is not None:
        grad_x, grad_branch_weight, _ = _norm_backward(ctx.norm, x, branch_weight, grad_x)
    grads = (grad_x, grad, grad_branch_weight, grad_weight, grad_bias)
    found = (*grads, *[None] * (4 if ctx.quantizes else 2), grad_gate, None, grad_total_factor)
    return tuple([g if w else None for g, w in zip(found, wanted, strict=False)])


def _norm_backward(norm: Norm, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``x``, ``weight`` and a bias, in float32; rounding counts as the identity."""
    h, grad, shape = x.float(), grad.float(), weight.shape
    if weight.ndim == 2:
        weight = of_samples(weight, x)
    if norm.is_layer:
        h = h - h.mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + norm.eps)
    y = h * rstd
    scaled = grad * (1.0 + weight.float() if norm.adds_one else weight.float())
    inner = scaled - y * (scaled * y).mean(dim=-1, keepdim=True)
    if norm.is_layer:
        inner = inner - scaled.mean(dim=-1, keepdim=True)
    sums = [each.sum_to_size(weight.shape).view(shape) for each in (grad * y, grad)]
    return inner * rstd, sums[0], sums[1]


_LAST_OF_SUMS = {
    "add_norm_quantize": {"gate": "Tensor? gate=None", "factor": "float factor=1.0"},
    "add_norm": {
        "gate": "Tensor? gate=None",
        "factor": "float factor=1.0",
        "total_factor": "Tensor? total_factor=None",
    },
}
"""The last arguments of operators that add, by name, as they are declared."""


def _declare(name: str, tensors: str, compute: Callable[..., Any], **gradients: Any) -> None:
    """Declares the operator ``name``: of ``tensors``, the fields of a norm, for rows two more, for sums those of
    ``_LAST_OF_SUMS``.

    ``compute``: takes the norm as one value, like the functions of ``dispatch``.
    """
    names = [each.split()[-1] for each in tensors.split(", ")]
    count, end = len(names), len(names) + 2
    outputs = [place is not None for place in _OUTPUTS[name]]
    rows = ", Tensor? input_scale, ScalarType? dtype=None" if outputs[2] else ""
    of_sum = _LAST_OF_SUMS.get(name, {})
    more = "".join(f", {declared}" for declared in of_sum.values())
    returned = ", ".join(["Tensor"] * sum(outputs))

    def rest(arguments: tuple[Any, ...]) -> dict[str, Any]:
        """What follows the norm; PyTorch leaves out the last ones that are None."""
        given = dict(zip((*(("input_scale", "dtype") if rows else ()), *of_sum), arguments[end:], strict=False))
        return {each: value for each, value in given.items() if value is not None}

    def run(*arguments: Any) -> Any:
        return compute(*arguments[:count], Norm(*arguments[count:end]), **rest(arguments))

    def fake(*arguments: Any) -> Any:
        x, given = arguments[0], dict(zip(names, arguments, strict=False))
        residual, branch_weight, weight, bias = (given.get(each) for each in _OPERANDS)
        norm, others = Norm(*arguments[count:end]), rest(arguments)
        call = NormCall(x, residual, branch_weight, others.pop("gate", None), weight, bias, norm, **others)
        checks.check_norm(name, call)
        made = (
            x.new_empty(x.shape if call.adds else 0),
            x.new_empty(0 if weight is None else x.shape),
            x.new_empty(x.shape, dtype=others.get("dtype", INT8.storage)),
            x.new_empty(x.shape[:-1], dtype=torch.float32),
        )
        out = tuple(each for each, is_output in zip(made, outputs, strict=True) if is_output)
        return out if len(out) > 1 else out[0]

    schema = (
        f"{name}({tensors}, str norm, float eps{rows}{more}) -> {f'({returned})' if sum(outputs) > 1 else returned}"
    )
    operator(schema, compute=run, fake=fake, **gradients)


def _add_norm(
    x: Tensor,
    residual: Tensor | None,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    total, normed = dispatch.add_norm(x, residual, branch_weight, weight, bias, norm, **others)
    return x.new_empty(0) if total is x else total, x.new_empty(0) if weight is None else normed


_WEIGHTS = "Tensor? branch_weight, Tensor? weight, Tensor? bias"
_OF_SUM = {"setup_context": _sum_setup, "backward": _sum_backward}
_OF_POST = {"setup_context": _post_setup, "backward": _post_backward}
_POST = "Tensor x, Tensor residual, Tensor weight, Tensor? bias"
_declare("norm_quantize", "Tensor x, Tensor weight, Tensor? bias", dispatch.norm_quantize, **NO_GRADIENT)
_declare("add_norm_quantize", f"Tensor x, Tensor residual, {_WEIGHTS}", dispatch.add_norm_quantize, **_OF_SUM)
_declare("add_norm", f"Tensor x, Tensor? residual, {_WEIGHTS}", _add_norm, **_OF_SUM)
_declare("post_norm", _POST, dispatch.post_norm, **_OF_POST)
_declare("post_norm_quantize", _POST, dispatch.post_norm_quantize, **_OF_POST)
