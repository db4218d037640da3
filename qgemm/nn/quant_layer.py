"""``QuantLayer``: what every quantized layer has in common, which is how it keeps its values.

All state is plain ``nn.Parameter``s, none of which requires a gradient: it survives ``state_dict``, safetensors,
``deepcopy`` and offloading as it is. Int8 values stay int8 and scales float32 whatever dtype the module is moved to;
only biases follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from qgemm.scheme import QuantScheme

Layer = TypeVar("Layer", bound="QuantLayer")


class QuantLayer(nn.Module):
    """A layer with int8 weights. ``QuantLinear`` and ``QuantExperts`` are the kinds there are.

    - ``scheme``: how it is quantized.
    - ``weight_names``: its int8 parameters. Each has a scale for every row, float32, named ``<weight>_scale``.
    - ``scale_names``: all of its float32 parameters. The remaining ones are biases, of any float dtype.
    - ``made_by``: the class method that makes one of a float layer.
    """

    weight_names: ClassVar[tuple[str, ...]]
    scale_names: ClassVar[tuple[str, ...]]
    made_by: ClassVar[str]
    scheme: QuantScheme

    @property
    def fixed_names(self) -> tuple[str, ...]:
        """The parameters whose dtype never changes: all but biases."""
        return self.weight_names + self.scale_names

    @property
    def is_static(self) -> bool:
        """Whether activations are quantized with ``input_scale`` instead of a scale found at run time."""
        return self.scheme.is_static

    def _apply(self: Layer, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Layer:
        # .to(dtype), .half() and .type() would cast values whose dtype is their meaning; only the device may change.
        fixed = [getattr(self, name) for name in self.fixed_names]

        def keep_dtype(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if applied.dtype != tensor.dtype and any(tensor is parameter for parameter in fixed):
                return tensor.detach().to(applied.device)
            return applied

        super()._apply(keep_dtype, recurse)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Copying floats into int8 would truncate them without a word; a scale in another dtype is only widened.
        error_messages: list[str] = args[-1]
        own = type(self).__name__
        for name in self.weight_names:
            weight = state_dict.get(prefix + name)
            if weight is not None and weight.dtype != torch.int8:
                error_messages.append(
                    f"{prefix}{name} is {weight.dtype} but {own} holds torch.int8: load the float layer and convert it "
                    f"with {own}.{self.made_by}"
                )
                return
        scales = {
            prefix + name: state_dict[prefix + name].to(torch.float32)
            for name in self.scale_names
            if prefix + name in state_dict and state_dict[prefix + name].dtype != torch.float32
        }
        super()._load_from_state_dict({**state_dict, **scales} if scales else state_dict, prefix, *args)


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that requires no gradient."""
    return nn.Parameter(tensor, requires_grad=False)
