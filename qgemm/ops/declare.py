"""``operator``: an operator of ``torch.ops.qgemm``, declared in one place.

- Autocast: ``x`` is cast as that of ``F.linear`` would be, so that a quantized layer gives the dtype of a float one.
- Autograd, of both modes. ``torch.library.register_autograd`` isn't used: it drops tangents of forward mode without a
  word, and refuses ``torch.func.grad``.
- ``vmap`` over ``x``, and what is of its shape, is one call with one dimension more.
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

_library = torch.library.Library("qgemm", "FRAGMENT")  # which forgets its operators when it goes
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def operator(
    schema: str,
    cpu: Function,
    cuda: Function,
    fake: Function,
    *,
    setup_context: Function | None = None,
    backward: Function | None = None,
    jvp: Function | None = None,
    autocast: bool = False,
    batched: Sequence[int] = (),
) -> Any:
    """Declares the operator of ``schema``, ``"name(Tensor x, ...) -> Tensor"``; returns ``torch.ops.qgemm.name``.

    - ``cpu(*arguments)``, ``cuda(*arguments)``: what computes it there.
    - ``fake(*arguments)``: the output for tensors without values, after the checks that the other two make.
    - ``setup_context(ctx, inputs, output)``: keeps in ``ctx`` what ``backward`` needs; None if that is nothing.
    - ``backward(ctx, wanted, *grads)``: the gradients of all arguments; ``wanted`` says for which there must be one.
      None for an operator whose output nothing can be differentiated through.
    - ``jvp(args, tangents)``: the tangent of the output, in forward mode; ``tangents`` are None where an argument has
      none. It may raise. Where it is None, forward mode raises ``NotImplementedError``.
    - ``autocast``: whether the first argument is cast under autocast.
    - ``batched``: the arguments of which, under ``vmap``, a batch is one call.
    """
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, cpu, "CPU")
    _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"qgemm::{name}", fake, lib=_library)
    declared = getattr(torch.ops.qgemm, name)
    if backward is not None:
        _register_autograd(declared.default, name, setup_context or _keep_nothing, backward, jvp)
    if autocast:
        _register_autocast(declared, name)
    if batched:
        _register_vmap(declared, name, batched)
    return declared


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The ``setup_context`` of a ``backward`` that needs nothing."""


def _mark_outputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*([output] if isinstance(output, Tensor) else output))


NO_GRADIENT: dict[str, Any] = {
    "setup_context": _mark_outputs,
    "backward": lambda ctx, wanted, *grads: (None,) * len(wanted),
}
"""Of ``operator``, for one whose outputs require no gradient though its inputs may, such as one that rounds."""


def gradients_through(function: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of ``inputs``, where ``grads`` are those of ``function(*inputs)``, a tuple of plain PyTorch.

    For a ``backward`` without a formula of its own. It has derivatives in turn where somebody may want them.
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
    """``x`` as ``F.linear`` would take it under autocast: float64 and what is no float stay as they are."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() and x.dtype != torch.float64 else x


def _register_autocast(declared: Any, name: str) -> None:
    def run(x: Tensor, *others: Any) -> Any:
        x = to_autocast_dtype(x)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return declared(x, *others)

    for device in ("CPU", "CUDA"):
        _library.impl(name, run, f"Autocast{device}")


def _register_autograd(
    overload: Any, name: str, setup_context: Function, backward: Function, jvp: Function | None
) -> None:
    def compute(keyset: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        # Outer levels of torch.func are below; a Function's forward turns off what they need.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            out = compute(keyset, *args)
        setup_context(ctx, args, out)
        return out

    def backward_of_all(ctx: Any, *grads: Tensor) -> Any:
        return None, *backward(ctx, ctx.needs_input_grad[1:], *grads)

    # Of one level: this is the autograd of one level of torch.func already.
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
