"""``operator``: declares an operator of ``torch.ops.qgemm``, with everything about it in one place.

- Autocast: ``x`` is cast as ``F.linear`` would cast it, so that a quantized layer returns the dtype of a float one.
- Autograd, in reverse and forward mode. ``torch.library.register_autograd`` isn't used, because it silently drops
  forward-mode tangents and refuses ``torch.func.grad``.
- ``vmap`` over ``x``, and over arguments of its shape, is one call with one more dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

Function = Callable[..., Any]

_library = torch.library.Library("qgemm", "FRAGMENT")  # kept, because its operators are removed with it
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

# For tensors that the checks in an implementation refuse; PyTorch's own error lists all of its backends.
_REFUSED = ("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA")


def operator(
    schema: str,
    compute: Function,
    fake: Function,
    *,
    setup_context: Function | None = None,
    backward: Function | None = None,
    jvp: Function | None = None,
    autocast: bool = False,
    batched: Sequence[int] = (),
) -> Any:
    """Declares the operator of ``schema``, ``"name(Tensor x, ...) -> Tensor"``; returns ``torch.ops.qgemm.name``.

    - ``compute(*arguments)``: the implementation, on a CPU and on a GPU.
    - ``fake(*arguments)``: the output for tensors without values, after the same checks.
    - ``setup_context(ctx, inputs, output)``: keeps what ``backward`` needs in ``ctx``; None if it needs nothing.
    - ``backward(ctx, wanted, *grads)``: the gradients of all arguments; ``wanted`` says which are needed. None for an
      operator whose output can't be differentiated.
    - ``jvp(args, tangents)``: the tangent of the output, in forward mode; ``tangents`` are None for arguments without
      one. It may raise. If it is None, forward mode raises ``NotImplementedError``.
    - ``autocast``: whether the first argument is cast under autocast.
    - ``batched``: the indices of the arguments that ``vmap`` may batch, in one call.
    """
    name = schema.split("(")[0]
    _library.define(schema)
    for key in ("CPU", "CUDA", *_REFUSED):
        _library.impl(name, compute, key)
    torch.library.register_fake(f"qgemm::{name}", fake, lib=_library)
    declared = getattr(torch.ops.qgemm, name)
    if backward is not None:
        _register_autograd(declared.default, name, setup_context, backward, jvp)
    if autocast:
        _register_autocast(declared, name)
    if batched:
        _register_vmap(declared, name, batched)
    return declared


def differentiable(name: str, direct: Function, setup_context: Function, backward: Function) -> Function:
    """``direct`` with gradients in reverse mode, for calls that nothing but these needs to see.

    Its first argument is what a plan recalls for such a call without gradients, or None; the arguments of ``direct``
    follow. The other parameters are those of ``operator``. Through the dispatcher such a call takes the host several
    times as long: it crosses into Python for autograd, and again for the implementation.
    """

    def forward(ctx: Any, recalled: Function | None, *args: Any) -> Any:
        out = None if recalled is None else recalled(*args)
        if out is None:
            out = direct(*args)
        setup_context(ctx, args, out)
        return out

    def backward_of_all(ctx: Any, *grads: Tensor) -> Any:
        return None, *backward(ctx, ctx.needs_input_grad[1:], *grads)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_all)}
    # Single-level, because no transform of torch.func is active: looking for those takes as long as all the rest.
    function: Any = type(f"{name}_direct_derivative", (_SingleLevelFunction,), methods)
    return function.apply  # type: ignore[no-any-return]


def _mark_outputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*([output] if isinstance(output, Tensor) else output))


NO_GRADIENT: dict[str, Any] = {
    "setup_context": _mark_outputs,
    "backward": lambda ctx, wanted, *grads: (None,) * len(wanted),
}
"""Arguments of ``operator`` if outputs require no gradient though inputs may, such as for an operator that rounds."""


def gradients_through(function: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of ``inputs``, given ``grads`` of ``function(*inputs)``, a tuple computed by plain PyTorch.

    For a ``backward`` without a formula of its own. The result can be differentiated again where that may be needed.
    """
    if torch.is_grad_enabled():  # with create_graph=True, and always in torch.func
        return torch.func.vjp(function, *inputs)[1](tuple(grads))  # type: ignore[no-any-return]
    with torch.enable_grad():
        sources = [each.detach().requires_grad_() for each in inputs]
        outs = function(*sources)
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
    outs, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(outs, sources, grads, allow_unused=True)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """``x`` as ``F.linear`` casts it under autocast: float64, and tensors that aren't float, keep their dtype."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() and x.dtype != torch.float64 else x


def without_autocast() -> Any:
    """A context in which autocast is off, on every device; it takes less time than ``torch.autocast``."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def _register_autocast(declared: Any, name: str) -> None:
    def run(x: Tensor, *others: Any) -> Any:
        x = to_autocast_dtype(x)
        with without_autocast():
            return declared(x, *others)

    for device in ("CPU", "CUDA"):
        _library.impl(name, run, f"Autocast{device}")


def _register_autograd(
    overload: Any, name: str, setup_context: Function | None, backward: Function, jvp: Function | None
) -> None:
    def compute(keyset: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        # Outer levels of torch.func run below this; a Function's forward disables modes that they need.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            out = compute(keyset, *args)
        if setup_context is not None:
            setup_context(ctx, args, out)
        return out

    def backward_of_all(ctx: Any, *grads: Tensor) -> Any:
        return None, *backward(ctx, ctx.needs_input_grad[1:], *grads)

    # Single-level: this function already is the autograd of one level of torch.func.
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_all)}
    function: Any = type(f"{name}_derivative", (_SingleLevelFunction,), methods)

    def reverse(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            with enable_single_level_autograd_function():
                return function.apply(keyset, *args)
        return compute(keyset, *args)

    def run(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level < 0:
            return reverse(keyset, *args)
        primals, tangents = zip(*map(_unpack, args), strict=True)
        if all(each is None for each in tangents):
            return reverse(keyset, *args)
        if jvp is None:
            raise NotImplementedError(
                f"{name} has no derivative in forward mode (torch.func.jvp, jacfwd, forward_ad): use reverse mode, "
                "such as torch.func.vjp and jacrev"
            )
        out = reverse(keyset, *primals)
        along = jvp(primals, tangents)
        return forward_ad.make_dual(out, along.to(out.dtype))

    _library.impl(name, run, "Autograd", with_keyset=True)


def _register_vmap(declared: Any, name: str, batched: Sequence[int]) -> None:
    def run(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
        if any(dim is not None for at, dim in enumerate(in_dims) if at not in batched):
            raise NotImplementedError(
                f"{name} under vmap accepts a batch of x only: call it once for each weight or scale"
            )
        out: Tensor = declared(*(batch(at, each, info, in_dims) for at, each in enumerate(args)))
        return out, 0

    def batch(at: int, value: Any, info: Any, in_dims: Sequence[int | None]) -> Any:
        if at not in batched or value is None:
            return value
        dim = in_dims[at]
        return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

    torch.library.register_vmap(f"qgemm::{name}", run, lib=_library)


def _unpack(value: Any) -> tuple[Any, Tensor | None]:
    if not isinstance(value, Tensor):
        return value, None
    primal, tangent = forward_ad.unpack_dual(value)
    return primal, tangent
