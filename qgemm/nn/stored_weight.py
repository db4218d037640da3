"""``StoredWeight``: what code around a quantized layer gets for ``layer.weight``.

The int8 values that a layer stores are no weight: a product with them is wrong by their scales, and PyTorch would
silently multiply them with floats. So the parameter itself is a plain ``nn.Parameter`` in the usual place
(``named_parameters``, ``state_dict``, and whatever moves, shards or saves parameters), and the attribute returns this
view of it. The view has the parameter's device, shape and values, counts as an ``nn.Parameter``, and forwards
attributes and ``data`` to it; but operations that would give floats raise an error that names the layer. Its dtype
reads as int8, also where values are packed in uint8 or are float8, because code that casts its input to the dtype of a
weight knows int8 (T5's, PEFT's). While a model is traced, code may only read dtype, device and shape
(``TracedWeight``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


def refuse_to_compute(layer: str, dtype: torch.dtype) -> RuntimeError:
    """The error for code that uses quantized values, of ``dtype``, as the weight of ``layer``."""
    stored = str(dtype).removeprefix("torch.")
    return RuntimeError(  # after a TypeError, an operator would raise one of its own
        f"{layer or 'a layer'} is quantized: its weight is stored as {stored}, with separate scales, and can't be "
        f"used directly in a computation, as other code does: leave it in float (skip={layer or 'its name'!r} in "
        "quantize_model), or use its dequantize().weight"
    )


SEEN_AS = torch.int8
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_ASK_FOR_FLOATS = (torch.is_floating_point, Tensor.is_floating_point)


class StoredWeight(Tensor):
    """A view of a parameter with quantized values, which refuses to take part in float computations.

    - ``stored``: the parameter itself, or a view of it.
    - ``layer``: the name of the layer that holds it.
    """

    stored: Tensor
    layer: str

    @staticmethod
    def __new__(cls, stored: Tensor, layer: str) -> StoredWeight:
        """A view that shares the memory of ``stored``."""
        view: StoredWeight = Tensor._make_subclass(cls, stored.detach(), False)
        object.__setattr__(view, "stored", stored)
        object.__setattr__(view, "layer", layer)
        return view

    @property
    def _is_param(self) -> bool:  # type: ignore[override]  # isinstance(view, nn.Parameter) reads this
        return isinstance(self.stored, nn.Parameter)

    def __getattr__(self, name: str) -> Any:
        """An attribute that others have set on the parameter."""
        if name in ("stored", "layer"):
            raise AttributeError(name)
        return getattr(self.stored, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the parameter's attribute, ``data`` too."""
        setattr(self.stored, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the parameter."""
        return self.stored.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The parameter, pickled."""
        return self.stored.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func`` with the parameters; raises ``RuntimeError`` if an argument or the result is float."""
        if func == _DTYPE:
            return SEEN_AS
        if func in _ASK_FOR_FLOATS:
            return False
        view = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        args, kwargs = tree_map_only(cls, lambda each: each.stored, (args, kwargs or {}))
        is_about_values = not _is_of_its_form(func)
        if is_about_values and (any(map(_is_float, tree_leaves((args, kwargs)))) or _writes_floats(func, args, kwargs)):
            raise refuse_to_compute(view.layer, view.stored.dtype)
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            # Such as for random numbers or norms, which exist only for floats.
            if isinstance(error, NotImplementedError) or "floating point" in str(error):
                raise refuse_to_compute(view.layer, view.stored.dtype) from error
            raise
        if not is_about_values or isinstance(out, torch.Size):  # tree_map_only would turn a Size into a tuple
            return out
        if any(map(_is_float, tree_leaves(out))):
            raise refuse_to_compute(view.layer, view.stored.dtype)

        def again(each: Tensor) -> Tensor:
            # Code that moves a parameter to another device is about to store it, so it gets a plain tensor.
            same = each.dtype == view.stored.dtype and each.device == view.stored.device
            return StoredWeight(each, view.layer) if same else each

        return tree_map_only(Tensor, again, out)


class TracedWeight:
    """What a compiler sees in place of a ``StoredWeight``: dtype, device and shape; anything else raises."""

    def __init__(self, stored: Tensor, layer: str) -> None:
        """Stands for the parameter ``stored`` of ``layer``."""
        self.dtype, self.device, self.shape, self.layer = SEEN_AS, stored.device, stored.shape, layer

    def __getattr__(self, name: str) -> Any:
        """Raises ``RuntimeError``."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse_to_compute(self.layer, self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raises ``RuntimeError``."""
        view = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise refuse_to_compute(view.layer, view.dtype)


def _is_float(value: Any) -> bool:
    """Whether it is a float tensor for computations; floats of one byte are quantized values."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.itemsize > 1


def _writes_floats(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function writes a float number into a tensor in place, where it would be truncated."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
    return in_place and any(isinstance(each, float) for each in tree_leaves((args, kwargs)))


def _is_of_its_form(func: Callable[..., Any]) -> bool:
    """Whether a function reads only shape, device and dtype, or is one of qgemm's own, which know the values."""
    name = getattr(func, "__name__", "")
    return name.startswith("new_") or name.endswith("_like") or str(func).startswith("qgemm.")


# Where a compiler gives up on code around a layer, that code runs uncompiled, and so must these functions: compiled by
# themselves they fail inside PyTorch 2.15's compiler, with an error that names no layer. (torch.compiler.disable does
# the same, but imports the compiler.)
with suppress(AttributeError):  # other versions of PyTorch may have these elsewhere
    _frames: Any = torch._C._dynamo.eval_frame
    _as_it_is = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
    for _function in (StoredWeight.__new__, StoredWeight.__torch_function__.__func__):  # type: ignore[attr-defined]
        _frames.set_code_exec_strategy(_function.__code__, _as_it_is)
