"""Whether a call may go past the dispatcher, directly to what computes it.

The way through the dispatcher to a function in Python and back takes about 7 us of a call.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def check_is_tensor(x: Any, name: str = "the layer's input") -> None:
    """Raises ``TypeError`` for an input of a layer, called ``name``, that is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")


def seen_by_others(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    residual: Tensor | None = None,
) -> bool:
    """Whether a call concerns more than the operator's CPU or CUDA implementation.

    That is: gradients, subclasses of Tensor, modes, ``torch.func``, autocast, tracing, a running profiler.

    Raises ``TypeError`` for an ``x`` that is no tensor.
    """
    check_is_tensor(x)
    return (
        not (x.is_cuda or x.is_cpu)
        or not (type(x) in _PLAIN and type(weight) in _PLAIN and type(weight_scale) in _PLAIN)
        or not (type(bias) in _PLAIN and type(input_scale) in _PLAIN and type(residual) in _PLAIN)
        or (
            torch.is_grad_enabled()
            and (
                x.requires_grad
                or weight_scale.requires_grad
                or (bias is not None and bias.requires_grad)
                or (input_scale is not None and input_scale.requires_grad)
                or (residual is not None and residual.requires_grad)
            )
        )
        or _is_watched(x)
    )


def rows_seen_by_others(x: Tensor, *others: Tensor | None) -> bool:
    """``seen_by_others`` for an operator on rows ``x``, whose other tensors may be None."""
    check_is_tensor(x)
    tensors = (x, *others)
    return (
        not (x.is_cuda or x.is_cpu)
        or not all(type(tensor) in _PLAIN for tensor in tensors)
        or (torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors))
        or _is_watched(x)
    )


def _is_watched(x: Tensor) -> bool:
    """Whether something is on that sees every call."""
    return (
        forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
        or torch._C._is_tracing()
        or torch._C._autograd._profiler_enabled()
    )
