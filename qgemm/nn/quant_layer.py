"""``QuantLayer``: what all quantized layers share: how they keep their values.

All state is plain ``nn.Parameter``s that require no gradient: it survives ``state_dict``, safetensors, ``deepcopy`` and
offloading as it is. Quantized values and float32 scales keep their dtype when the module is converted to another one;
only biases follow. Code around a layer that reads its weight gets a view that refuses to take part in computations.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from qgemm.nn.shard import Shard, Split, Style
from qgemm.nn.stored_weight import StoredWeight, TracedWeight
from qgemm.numerics.formats import FLOAT_DTYPES, FP8
from qgemm.scheme import QuantScheme

Layer = TypeVar("Layer", bound="QuantLayer")
_REPLACE_WEIGHTS = {f"torch.nn.utils.{name}" for name in ("parametrizations", "parametrize", "prune", "weight_norm")}


class Merged(Protocol):
    """The object that has placed parameters of several layers side by side: ``nn.blocks.MergedWeights``."""

    def place(self) -> None:
        """Called when parameters of the layer have been moved or loaded."""

    def let_go(self) -> None:
        """Called when a parameter of the layer is replaced."""


class QuantLayer(nn.Module):
    """A layer with quantized weights: a ``LinearLayer`` of some kind, or ``QuantExperts``.

    - ``scheme``: how it is quantized.
    - ``weight_names``: the parameters that hold quantized values.
    - ``scale_names``: those that hold scales.
    - ``index_names``: those that hold other numbers of a fixed dtype, such as the indices of columns.
    - ``made_by``: the class method that makes a layer from a float one.
    - ``layer_name``: its name in the model, for errors; empty for a layer by itself.
    - ``merged``: the object to notify when its parameters move, because they are rows of a shared tensor; or None.
    - ``shard``: which part of a layer it is, if the layer is split among processes; its sizes are then those of the
      part.

    The remaining parameters are biases and the like, of any float dtype.
    """

    weight_names: ClassVar[tuple[str, ...]]
    scale_names: ClassVar[tuple[str, ...]]
    index_names: ClassVar[tuple[str, ...]] = ()
    made_by: ClassVar[str]
    scheme: QuantScheme
    layer_name: str = ""
    merged: Merged | None = None
    shard: Shard | None = None

    @property
    def float_numel(self) -> int:
        """The number of values in the float layer's weights and biases."""
        raise NotImplementedError

    def splits(self, style: Style, parts: int = 1) -> dict[str, Split]:
        """How each parameter is split for a ``Shard`` of this ``style``, by name; other parameters stay whole."""
        raise NotImplementedError

    def why_whole(self, style: Style, size: int, parts: int = 1) -> str:
        """Why the layer can't be split among ``size`` processes in this ``style``; empty if it can."""
        raise NotImplementedError

    def take_shard(self, shard: Shard) -> None:
        """Called when the parameters have become those of ``shard``."""
        self.shard = shard

    def cut(self, shard: Shard) -> None:
        """Reduces a whole layer to the part of ``shard``."""
        for name, split in self.splits(shard.style, shard.parts).items():
            setattr(self, name, frozen(shard.part_of(self.stored(name).detach(), split)))
        self.take_shard(shard)

    def check_is_whole(self) -> None:
        """Raises ``ValueError`` for a shard, which stands for no float layer; part of a rotation, say, isn't one."""
        if self.shard is not None:
            raise ValueError(
                f"{self.layer_name or type(self).__name__} is split among processes: call "
                "model.save_pretrained(folder) in all of them, and dequantize what qgemm.load_quantized(folder) returns"
            )

    def whole(self, name: str) -> Tensor:
        """The parameter ``name`` of the whole layer, if this is a shard. All processes must call it."""
        own: Tensor = self.stored(name).detach()
        if self.shard is None:
            return own
        split = self.splits(self.shard.style, self.shard.parts).get(name)
        return own if split is None else self.shard.whole_of(own, split)

    def settle(self) -> None:
        """Called after parameters were made, moved or loaded, to update what is derived from them."""
        if self.merged is not None:
            self.merged.place()

    def __getattr__(self, name: str) -> Any:
        """As in ``nn.Module``; quantized values come as a ``StoredWeight``, which can't be used with floats."""
        value = super().__getattr__(name)
        if name not in type(self).weight_names or not isinstance(value, Tensor):
            return value
        if torch.compiler.is_compiling():
            return TracedWeight(value, self.layer_name)
        if type(value) is not nn.Parameter or self._is_asked_for(value, sys._getframe(1)):
            return value
        return StoredWeight(value, self.layer_name)

    def _is_asked_for(self, parameter: nn.Parameter, caller: FrameType) -> bool:
        """Whether the code that reads an attribute needs ``parameter`` itself, not a ``StoredWeight``.

        accelerate does, because it casts new values to the dtype that it finds. On meta, code that loads compares
        dtypes, shapes and identities; only the code of a model whose layers accelerate offloads has no use for these.

        Raises ``RuntimeError`` for code of PyTorch that is about to replace the parameter by a computed tensor, and of
        diffusers that is about to join float weights.
        """
        module = str(caller.f_globals.get("__name__"))
        if module in _REPLACE_WEIGHTS:
            layer = self.layer_name
            raise RuntimeError(
                f"{layer or 'a layer'} is quantized: its weight can't be parametrized or pruned. Do that to the float "
                "layer, and make it permanent (remove_parametrizations, prune.remove) before you quantize; or leave "
                f"the layer in float (skip={layer or 'its name'!r} in quantize_model)"
            )
        package = module.partition(".")[0]
        if package == "diffusers" and caller.f_code.co_name == "fuse_projections":
            raise RuntimeError(
                f"{self.layer_name or 'a layer'} is quantized: fuse_qkv_projections joins float weights, so call it "
                "before quantize_model, or call qgemm.fuse(model) instead"
            )
        if not parameter.is_meta:
            return package == "accelerate"
        return package in ("accelerate", "torch", "qgemm") or "_hf_hook" not in vars(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """As in ``nn.Module``; for a ``StoredWeight``, the parameter itself is set."""
        if type(value) is StoredWeight:
            value = value.stored
        elif type(value) is Tensor and name in type(self).weight_names and name not in self._parameters:
            value = StoredWeight(value, self.layer_name)  # of a replica of nn.DataParallel, which has no parameters
        super().__setattr__(name, value)
        if self.merged is not None and name in self._parameters:
            self.merged.let_go()

    def stored(self, name: str) -> Any:
        """A parameter itself, with its stored values."""
        parameters = self._parameters
        if name in parameters:
            return parameters[name]
        value = getattr(self, name)  # None, or a tensor that is no parameter
        return value.stored if type(value) is StoredWeight else value

    @property
    def fixed_names(self) -> tuple[str, ...]:
        """The parameters whose dtype never changes: all except biases and the like."""
        return self.weight_names + self.scale_names + self.index_names

    def accepts_dtype(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the parameter ``name`` may have ``dtype``; parameters outside ``fixed_names`` may have any."""
        return name not in self.fixed_names or dtype == self.stored(name).dtype

    def take_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Prepares the parameter ``name``, one of ``fixed_names``, for values of a ``dtype`` that it accepts."""
        if (known := self.stored(name)).dtype != dtype:
            setattr(self, name, frozen(torch.empty_like(known, dtype=dtype)))

    def problem_with(self, name: str, value: Tensor) -> str:
        """What is wrong with ``value`` as the parameter ``name``, given its shape and dtype; empty if nothing is."""
        if name in self.weight_names and value.dtype == FP8.storage:
            return "holds NaN" if bool((value.view(torch.uint8) & 127 == 127).any()) else ""
        if name == "input_scale" and not bool((value.isfinite() & (value > 0)).all()):
            return "is not finite and above 0 everywhere"
        # In some libraries' files, rows of zeros have a scale of 0.
        if name in self.scale_names and not bool((value.isfinite() & (value >= 0)).all()):
            return "holds NaN, Inf or a negative number"
        return ""

    @property
    def is_static(self) -> bool:
        """Whether activations are quantized with ``input_scale`` instead of a scale computed at run time."""
        return self.scheme.is_static

    def requires_grad_(self: Layer, requires_grad: bool = True) -> Layer:
        """As in ``nn.Module``, for False; raises ``RuntimeError`` for True."""
        if requires_grad:
            name = self.layer_name
            raise RuntimeError(
                f"{name or 'a layer'} is quantized, and its weight can't be trained: train an adapter on it, such as "
                f"LoRA, or leave it in float (skip={name or 'its name'!r} in quantize_model)"
            )
        return super().requires_grad_(False)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes, for ``pickle`` and ``deepcopy``; float8 parameters as what ``pickle`` can write."""
        own = {name: _Float8.of(parameter) for name, parameter in self._parameters.items()}
        return {**vars(self), "_parameters": own}

    def __copy__(self: Layer) -> Layer:
        """A layer with the same attributes, as of any module."""
        other = self.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def _apply(self: Layer, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Layer:
        # .to(dtype), .half() and .type() would cast values that only make sense in their dtype; only the device
        # changes.
        fixed = [self.stored(name) for name in self.fixed_names]

        def keep_dtype(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if applied.dtype != tensor.dtype and any(tensor is parameter for parameter in fixed):
                return tensor.detach().to(applied.device)
            return applied

        super()._apply(keep_dtype, recurse)
        self.settle()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # Code that saves drops tensors which share a storage with others, as rows of merged layers do.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.merged is not None and not keep_vars:
            for name in (prefix + name for name in self._parameters):
                if type(destination.get(name)) is Tensor:
                    destination[name] = with_storage_of_its_own(destination[name])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Copying floats into int8 would silently truncate them; a scale in another dtype is only widened.
        error_messages: list[str] = args[-1]
        own, scales = type(self).__name__, {}
        for name in self.fixed_names:
            value, wanted = state_dict.get(prefix + name), self.stored(name)
            if value is None or wanted is None:
                continue
            if not self.accepts_dtype(name, value.dtype):
                if name not in self.scale_names or wanted.dtype not in FLOAT_DTYPES:
                    error_messages.append(
                        f"{prefix}{name} is {value.dtype} but {own} holds {wanted.dtype}: load the float layer and "
                        f"convert it with {own}.{self.made_by}"
                    )
                    return
                scales[prefix + name] = value = value.to(torch.float32)
            if value.shape == wanted.shape and value.device.type != "meta":
                if problem := self.problem_with(name, value):
                    error_messages.append(f"{prefix}{name} {problem}")
                    return
            self.take_dtype(name, value.dtype)
        super()._load_from_state_dict({**state_dict, **scales} if scales else state_dict, prefix, *args)
        self.settle()


class _Float8:
    """A float8 parameter while a layer is pickled: as bytes, because ``pickle`` by itself can't write float8."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    @classmethod
    def of(cls, parameter: nn.Parameter | None) -> Any:
        """``parameter``, wrapped if it is float8."""
        if type(parameter) is nn.Parameter and parameter.dtype == FP8.storage:
            return cls(parameter)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = copy.deepcopy(self._parameter, memo)
        return copied

    def __reduce__(self) -> Any:
        return _from_bytes, (self._parameter.detach().view(torch.uint8),)


def _from_bytes(stored: Tensor) -> nn.Parameter:
    return frozen(stored.view(FP8.storage))


def quant_layers(model: nn.Module) -> dict[str, QuantLayer]:
    """The quantized layers of ``model`` by all of their names."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, QuantLayer)}


def has_quant_layers(model: nn.Module) -> bool:
    """Whether ``model`` has quantized layers."""
    return any(isinstance(module, QuantLayer) for module in model.modules())


def traced_as_leaf(layer: nn.Module, *inputs: Any) -> Any:
    """The node for a call of ``layer`` in ``torch.fx.symbolic_trace``, where it is a leaf, as ``nn.Linear`` is."""
    tracer: Any = next(each.tracer for each in inputs if isinstance(each, Proxy))
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), inputs, {})


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that requires no gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def with_storage_of_its_own(tensor: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is no larger than itself; ``tensor``, if it isn't contiguous."""
    storage, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize
    if tensor.is_meta or storage.nbytes() == tensor.nbytes or not tensor.is_contiguous():
        return tensor
    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return own.set_(storage[start : start + tensor.nbytes], 0, tensor.shape, tensor.stride())


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat(parts)``, which under autocast fails for float8, and for a 16-bit dtype other than autocast's."""
    if len(parts) == 1:
        return parts[0]
    sizes = [len(part) for part in parts]
    whole = parts[0].new_empty((sum(sizes), *parts[0].shape[1:]))
    for rows, part in zip(whole.split(sizes), parts, strict=True):
        rows.copy_(part)
    return whole


def float_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of the first parameter that is float in the float model too; None if there is none.

    Quantized values may be float8, and what a layer adds is float32 in a model of any dtype.
    """
    for module in model.modules():
        of_layer = module.fixed_names if isinstance(module, QuantLayer) else ()
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype in (*FLOAT_DTYPES, torch.float64) and name not in of_layer:
                return parameter.dtype
    return None


def narrowed(tensor: Tensor) -> Tensor:
    """``tensor``, converted to float32 if it is float64, with which no layer computes."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def check_sizes(**sizes: Any) -> None:
    """Raises ``ValueError`` unless the arguments, given by name, are whole numbers of at least 0."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(f"{name} is {size!r}; it must be a whole number, 0 or more")


def check_dtype(dtype: Any) -> None:
    """Raises ``ValueError`` for a ``dtype`` that no layer computes with; None stands for PyTorch's default."""
    if dtype is not None and dtype not in FLOAT_DTYPES:
        names = ", ".join(str(each) for each in FLOAT_DTYPES)
        raise ValueError(f"dtype is {dtype!r}; parts that stay in float have that dtype, one of {names}")
