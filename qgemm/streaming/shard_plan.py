"""What one file of the checkpoint holds, and what that is made of: all that a process needs to write it.

It goes to another process as JSON. That one reads the same source, and needs neither the model nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qgemm.streaming.float_tensors import FloatTensor


@dataclass(frozen=True)
class FloatWeight:
    """A weight that is to be quantized: its name and its layer's, its float values, and whether they are ``[K, N]``.

    It is called what the quantized layer calls it. That of experts is ``[E, N, K]``. ``scheme`` (its name) and sizes
    are those of the layer, or of one expert's. ``parameters``: what those that hold the weight are called in the files.
    """

    name: str
    layer: str
    scheme: str
    in_features: int
    out_features: int
    parameters: dict[str, str]
    values: FloatTensor
    is_transposed: bool = False


@dataclass(frozen=True)
class ShardPlan:
    """What a file holds.

    - ``tensors``: by name; their shapes and dtypes count.
    - ``weights``: the quantized weights that some of them are, or are scales of.
    - ``copied``: of all others, where their values come from.
    """

    tensors: dict[str, Tensor]
    weights: list[FloatWeight]
    copied: dict[str, FloatTensor]

    @cached_property
    def units(self) -> dict[str, FloatWeight | None]:
        """What is made in one go, in order, by name: weights, and tensors that are copied, with None."""
        owners = {name: weight for weight in self.weights for name in weight.parameters.values()}
        units = (owners.get(name) for name in self.tensors)
        return {(unit.name if unit else name): unit for name, unit in zip(self.tensors, units, strict=True)}

    @property
    def bytes_to_read(self) -> int:
        """The bytes of float values that all this is made of."""
        return sum(each.values.nbytes for each in self.weights) + sum(each.nbytes for each in self.copied.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, which ``from_dict`` takes."""
        return {
            "tensors": {name: [str(tensor.dtype), *tensor.shape] for name, tensor in self.tensors.items()},
            "weights": [{**vars(weight), "values": weight.values.to_dict()} for weight in self.weights],
            "copied": {name: tensor.to_dict() for name, tensor in self.copied.items()},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], float_tensor: Callable[[dict[str, Any]], FloatTensor]) -> ShardPlan:
        """What ``to_dict`` gave, also by way of JSON. ``float_tensor``: makes a tensor of what its ``to_dict`` gave."""
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
            for name, (dtype, *shape) in values["tensors"].items()
        }
        weights = [FloatWeight(**{**weight, "values": float_tensor(weight["values"])}) for weight in values["weights"]]
        return cls(tensors, weights, {name: float_tensor(each) for name, each in values["copied"].items()})
