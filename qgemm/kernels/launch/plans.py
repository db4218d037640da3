"""The plans of earlier calls, in the only cache of plans. A call finds its plan by guards, or else by its kind.

A kind is everything that a plan depends on: the operation, and the dtypes, devices, sizes and strides of the tensors.
Asking every tensor of a linear layer for all of these takes the host 2 us, and asking what else might need to see the
call (``ops.direct``) takes more than 1 us. PyTorch's own guards, those of ``torch.compile``, compare all of that in 0.3
us, together with the thread's dispatch keys: autograd, subclasses, modes, transforms, autocast.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

MAX_PLANS = 16_384
MAX_SIZES = 4096  # how many different sizes calls that are found by guards may have
MAX_GUARDS = 8  # for calls of the same sizes

P = TypeVar("P")
Run = Callable[..., Tensor | None]  # with the arguments of recall
Key = tuple[Any, ...]


class PlanCache(dict[tuple[object, ...], Any]):
    """Plans by kind. The first entry of a kind tells the operation."""

    def keep(self, kind: tuple[object, ...], plan: P) -> P:
        """Keeps ``plan`` for calls of this kind."""
        if len(self) >= MAX_PLANS:
            self.clear()
        self[kind] = plan
        return plan


plans = PlanCache()
_guarded: dict[Key, list[tuple[Callable[..., bool], Any]]] = {}
_PLAIN = {Tensor, torch.nn.Parameter}
# Not public. Without it, nothing is ever found by guards.
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)


def recall(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    residual: Tensor | None = None,
    what: object = None,
) -> Run | None:
    """The function that ``remember`` got for such a call of a linear layer, if only the operator needs to see it.

    ``other``: a tensor that only some layers have: a static scale of the input, zero points of the weight, or steps of
    its scales. ``what``: everything else that the layers' kernels depend on.
    """
    if type(x) not in _PLAIN:  # its sizes may be symbols
        return None
    key = x.shape, weight.shape, bias is None, other is None, residual is None, what
    tensors = _given(x, weight, weight_scale, bias, other)
    run: Run | None = find(key, tensors if residual is None else (*tensors, residual))
    return run


def find(key: Key, tensors: tuple[Tensor, ...]) -> Any:
    """What ``keep`` was given with ``key`` for tensors like these, if their call concerns nobody but the operator.

    ``key``: shapes of some of them, and all that a call depends on beside them. The first one's class is a plain one.
    """
    found = _guarded.get((torch.is_grad_enabled(), key))
    if (
        found is None
        or forward_ad._current_level >= 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
    ):
        return None
    for guard, run in found:
        if guard(*tensors):
            return run
    return None


def remember(
    run: Run,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    residual: Tensor | None = None,
    what: object = None,
    differentiates: bool = False,
) -> None:
    """Keeps ``run`` for calls like this one, which only the operator itself, or ``run``, needs to see.

    ``differentiates``: whether ``run`` has gradients.
    """
    key = x.shape, weight.shape, bias is None, other is None, residual is None, what
    tensors = _given(x, weight, weight_scale, bias, other)
    keep(run, key, tensors if residual is None else (*tensors, residual), differentiates)


def keep(run: Any, key: Key, tensors: tuple[Tensor, ...], differentiates: bool = False) -> None:
    """Keeps ``run`` for ``find``. ``differentiates``: whether it has gradients."""
    # Guards don't see whether gradients are on. If so, autograd needs to see a call with a tensor that requires them.
    records = torch.is_grad_enabled()
    if _Guards is None or (records and not differentiates and any(tensor.requires_grad for tensor in tensors)):
        return
    try:
        guard = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if not guard(*tensors):  # the same tensor is in two places
            return
    except (AttributeError, RuntimeError, SystemError, TypeError):  # from another version of PyTorch
        return
    if len(_guarded) >= MAX_SIZES:
        _guarded.clear()
    found = _guarded.setdefault((records, key), [])
    if len(found) >= MAX_GUARDS:
        found.clear()
    found.append((guard, run))


def _given(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, other: Tensor | None
) -> tuple[Tensor, ...]:
    if other is None:
        return (x, weight, weight_scale) if bias is None else (x, weight, weight_scale, bias)
    return (x, weight, weight_scale, other) if bias is None else (x, weight, weight_scale, bias, other)
