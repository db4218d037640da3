"""What an operator of ``torch.ops.qgemm`` does under autocast, in autograd of both modes, and under ``vmap``.

- Autocast: ``x`` is cast as that of ``F.linear`` would be, so that a quantized layer gives the dtype of a float one.
- Autograd, of both modes. ``torch.library.register_autograd`` isn't used: it drops tangents of forward mode without a
  word, and refuses ``torch.func.grad``.
- ``vmap`` over ``x`` alone is one call with one dimension more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

Tangent = Callable[[tuple[Any, ...], tuple[Any, ...]], Tensor]

_library = torch.library.Library("qgemm", "FRAGMENT")  # which forgets its rules when it goes
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def autocast(x: Tensor) -> Tensor:
    """``x`` as ``F.linear`` would take it under autocast: float64 and what is no float stay as they are."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() and x.dtype != torch.float64 else x


def register_autocast(name: str) -> None:
    """Has the operator called ``name`` cast its first argument under autocast."""
    operator = getattr(torch.ops.qgemm, name)

    def run(x: Tensor, *others: Any) -> Any:
        x = autocast(x)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(x, *others)

    for device in ("CPU", "CUDA"):
        _library.impl(name, run, f"Autocast{device}")


def register_autograd(name: str, setup: Callable[..., None], backward: Callable[..., Any], tangent: Tangent) -> None:
    """Gives the operator called ``name`` its derivatives.

    - ``setup(ctx, inputs, output)``: keeps in ``ctx`` what ``backward`` needs.
    - ``backward(ctx, wanted, *grads)``: the gradients of all arguments; ``wanted`` says for which there must be one.
    - ``tangent(args, tangents)``: that of the output; tangents are None where an argument has none. It may raise.
    """
    operator = getattr(torch.ops.qgemm, name).default

    def compute(keyset: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        # Outer levels of torch.func are below; a Function's forward turns off what they need.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            out = compute(keyset, *args)
        setup(ctx, args, out)
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
        out = reverse(keyset, *primals)
        along = tangent(primals, tangents)
        return forward_ad.make_dual(out, along.to(out.dtype))

    _library.impl(name, run, "Autograd", with_keyset=True)


def no_tangent(name: str) -> Tangent:
    """The rule of an operator without a derivative in forward mode: raises ``NotImplementedError``."""

    def refuse(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Tensor:
        raise NotImplementedError(
            f"{name} has no derivative in forward mode (torch.func.jvp, jacfwd, forward_ad): use reverse mode, such as "
            "torch.func.vjp and jacrev"
        )

    return refuse


def register_vmap(name: str) -> None:
    """Has ``vmap`` over the first argument of the operator called ``name`` make one call."""
    operator = getattr(torch.ops.qgemm, name)

    def run(info: Any, in_dims: Sequence[int | None], x: Tensor, *others: Any) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:]):
            raise NotImplementedError(f"{name} under vmap takes a batch of x alone, not of weights or scales")
        assert in_dims[0] is not None
        out: Tensor = operator(x.movedim(in_dims[0], 0), *others)
        return out, 0

    torch.library.register_vmap(f"qgemm::{name}", run, lib=_library)


def _unpack(value: Any) -> tuple[Any, Tensor | None]:
    if not isinstance(value, Tensor):
        return value, None
    primal, tangent = forward_ad.unpack_dual(value)
    return primal, tangent
