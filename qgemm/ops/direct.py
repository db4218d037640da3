"""Whether a call may bypass the dispatcher and go directly to its implementation.

A call through the dispatcher to a function in Python takes about 7 us more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qgemm.kernels.launch import plans

_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def check_is_tensor(x: Any, name: str = "the layer's input") -> None:
    """Raises ``TypeError``, calling it ``name``, if a layer's input isn't a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")


def in_forward_mode() -> bool:
    """Whether forward mode (``forward_ad``, ``torch.func.jvp``) computes tangents; gradients may be off."""
    return forward_ad._current_level >= 0


def is_exporting() -> bool:
    """Whether ``torch.export`` traces this call.

    Where PyTorch 2.11 compiles, ``torch.compiler.is_exporting()`` is always True.
    """
    return torch.compiler.is_compiling() and torch.compiler._is_exporting_flag


def seen_by_others(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a call of an operator on ``x`` and ``others`` needs more than its CPU or CUDA implementation.

    It does for a compiler, gradients, subclasses of Tensor, modes, ``torch.func``, autocast, tracing and profilers.

    Raises ``TypeError`` if ``x`` isn't a tensor.
    """
    if torch.compiler.is_compiling():
        return True
    check_is_tensor(x)
    if not (x.is_cuda or x.is_cpu):
        return True
    has_gradients = torch.is_grad_enabled()
    for tensor in (x, *others):
        if type(tensor) not in _PLAIN or (has_gradients and tensor is not None and tensor.requires_grad):
            return True
    return _is_watched(x)


def concerns_gradients_alone(x: Tensor, *others: Tensor | None) -> bool:
    """Whether gradients are all that a call which is ``seen_by_others`` needs beside the implementation."""
    if torch.compiler.is_compiling() or not (x.is_cuda or x.is_cpu):
        return False
    return all(type(tensor) in _PLAIN for tensor in (x, *others)) and not _is_watched(x)


def is_under_autocast(x: Tensor) -> bool:
    """Whether autocast may cast ``x``, a plain tensor."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and (x.is_cuda or x.is_cpu)
        and torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    )


def _is_watched(x: Tensor) -> bool:
    """Whether anything is active that sees every call."""
    return (
        in_forward_mode()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or is_under_autocast(x)
        or torch._C._is_tracing()
        or torch._C._autograd._profiler_enabled()
    )


def recall_launch(what: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...] | None:
    """Repeats a call of an operator that is a single launch, if ``remember_launch`` knows a similar one; else None.

    ``what``: the operator, and its arguments other than ``tensors``, the first of which isn't None.
    """
    x = tensors[0]
    if torch.compiler.is_compiling() or type(x) not in _PLAIN or x is None or not x.is_cuda:
        return None
    given = tuple([each for each in tensors if each is not None])
    run = plans.find((what, x.shape, *[each is None for each in tensors]), given)
    out: tuple[Tensor, ...] | None = None if run is None else run(given)
    return out


def remember_launch(
    what: tuple[Any, ...],
    tensors: Sequence[Tensor | None],
    made: tuple[Tensor, ...],
    launched: Callable[[], tuple[Any, Sequence[Tensor | None]]],
) -> None:
    """Remembers a call that nothing else needs to see, for similar calls. ``made``: its outputs.

    ``launched``: returns the launch that made them, and the launch's arguments.
    """
    x = tensors[0]
    if x is None or not x.is_cuda or not x.numel():
        return
    from qgemm.kernels.launch.recalled import RecalledLaunch

    given = tuple([each for each in tensors if each is not None])
    run = RecalledLaunch.of(*launched(), given, made)
    if run is not None:
        plans.keep(run, (what, x.shape, *[each is None for each in tensors]), given)
