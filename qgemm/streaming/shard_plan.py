"""The contents of one file of the checkpoint, and their sources: all that a process needs to write it.

It is sent to another process as JSON. That process reads the same source, and needs neither the model nor transformers.
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
    """A weight to be quantized: its name and its layer's, its float values, and whether they are ``[K, N]``.

    Its name is the one in the quantized layer. A weight of experts is ``[E, N, K]``. ``scheme`` (its name) and sizes
    are those of the layer, or of one expert's layer. ``parameters``: the names in the files of the parameters that
    store the weight.
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
    """The contents of a file.

    - ``tensors``: by name; only their shapes and dtypes matter.
    - ``weights``: the quantized weights to which some of the tensors belong.
    - ``copied``: for all other tensors, the source of their values.
    """

    tensors: dict[str, Tensor]
    weights: list[FloatWeight]
    copied: dict[str, FloatTensor]

    @cached_property
    def units(self) -> dict[str, FloatWeight | None]:
        """The units that are made in one go, in order, by name: weights; and copied tensors, with None."""
        owners = {name: weight for weight in self.weights for name in weight.parameters.values()}
        units = (owners.get(name) for name in self.tensors)
        return {(unit.name if unit else name): unit for name, unit in zip(self.tensors, units, strict=True)}

    @property
    def bytes_to_read(self) -> int:
        """The number of bytes of float values that the file is made from."""
        return sum(each.values.nbytes for each in self.weights) + sum(each.nbytes for each in self.copied.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values for ``from_dict``."""
        return {
            "tensors": {name: [str(tensor.dtype), *tensor.shape] for name, tensor in self.tensors.items()},
            "weights": [{**vars(weight), "values": weight.values.to_dict()} for weight in self.weights],
            "copied": {name: tensor.to_dict() for name, tensor in self.copied.items()},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], float_tensor: Callable[[dict[str, Any]], FloatTensor]) -> ShardPlan:
        """Reads what ``to_dict`` gave, also after JSON. ``float_tensor``: does the same for a ``FloatTensor``."""
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
            for name, (dtype, *shape) in values["tensors"].items()
        }
        weights = [FloatWeight(**{**weight, "values": float_tensor(weight["values"])}) for weight in values["weights"]]
        return cls(tensors, weights, {name: float_tensor(each) for name, each in values["copied"].items()})
