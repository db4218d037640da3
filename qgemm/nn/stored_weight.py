"""``StoredWeight``: what ``layer.weight`` of a quantized layer is to code around the layer.

The int8 values that a layer stores are no weight: whoever multiplies by them is off by their scales, and PyTorch would
let them be multiplied with floats without a word. So the parameter itself is a plain ``nn.Parameter``, where modules
keep theirs (``named_parameters``, ``state_dict``, and what moves, shards or saves them), and the attribute gives this
view of it. It has the device, shape and values of the parameter, passes for one, and takes attributes and ``data``
for it; but what would make floats of it raises, and names the layer. Its dtype is int8 to whoever asks, also where
values are packed in uint8, or float8: code that casts its input to the dtype of a weight knows that one (T5's, PEFT's).

While a model is traced, code may ask for dtype, device and shape alone (``TracedWeight``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


def refuse_to_compute(layer: str, dtype: torch.dtype) -> RuntimeError:
    """The error for code that takes quantized values, of ``dtype``, for the weight of ``layer``."""
    stored = str(dtype).removeprefix("torch.")
    return RuntimeError(  # an operator would answer a TypeError with one of its own
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
    def _is_param(self) -> bool:  # type: ignore[override]  # by which isinstance(view, nn.Parameter) goes
        return isinstance(self.stored, nn.Parameter)

    def __getattr__(self, name: str) -> Any:
        """What others have set on the parameter."""
        if name in ("stored", "layer"):
            raise AttributeError(name)
        return getattr(self.stored, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets it on the parameter, ``data`` too."""
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
        """Calls ``func`` with the parameters; raises ``RuntimeError`` where floats go in with them, or come out."""
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
        except NotImplementedError as error:  # as of random numbers, of which there are floats alone
            raise refuse_to_compute(view.layer, view.stored.dtype) from error
        if not is_about_values or isinstance(out, torch.Size):  # of which tree_map_only makes a tuple
            return out
        if any(map(_is_float, tree_leaves(out))):
            raise refuse_to_compute(view.layer, view.stored.dtype)

        def again(each: Tensor) -> Tensor:
            # What moves a parameter to another device is about to store it.
            same = each.dtype == view.stored.dtype and each.device == view.stored.device
            return StoredWeight(each, view.layer) if same else each

        return tree_map_only(Tensor, again, out)


class TracedWeight:
    """What a compiler sees in a ``StoredWeight``'s place: dtype, device and shape; anything else raises."""

    def __init__(self, stored: Tensor, layer: str) -> None:
        """Of the parameter ``stored`` of a layer."""
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
    """Whether it is a tensor of floats to compute with; those of one byte are quantized values."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.itemsize > 1


def _writes_floats(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function changes a tensor in place, by a float number, which would be cut to a stored value."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
    return in_place and any(isinstance(each, float) for each in tree_leaves((args, kwargs)))


def _is_of_its_form(func: Callable[..., Any]) -> bool:
    """Whether a function takes its shape, device and dtype alone, or is one of qgemm's own, which know the values."""
    name = getattr(func, "__name__", "")
    return name.startswith("new_") or name.endswith("_like") or str(func).startswith("qgemm.")


# Where a compiler gives up on code around a layer, that runs as it is, and so are these functions to: compiled by
# themselves they fail inside PyTorch 2.15's compiler, with an error that names no layer. (torch.compiler.disable says
# the same, but imports the compiler.)
with suppress(AttributeError):  # of a PyTorch that has these elsewhere
    _frames: Any = torch._C._dynamo.eval_frame
    _as_it_is = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
    for _function in (StoredWeight.__new__, StoredWeight.__torch_function__.__func__):  # type: ignore[attr-defined]
        _frames.set_code_exec_strategy(_function.__code__, _as_it_is)
