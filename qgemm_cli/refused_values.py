"""Finds values in a checkpoint that loading would refuse: converts them as ``load_quantized`` does, and drops them.

Which layers have biases depends on the model: for another library's files, a transformers model is built, without
values. For any other model, layers are known only by their schemes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qgemm.checkpoint.contents import Contents, check_unheld, read_converted
from qgemm.checkpoint.errors import CheckpointError, UnknownModel
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import split_name
from qgemm.nn import QuantExperts, QuantLayer
from qgemm.nn.kinds import meta_linear
from qgemm.scheme import QuantScheme
from qgemm_cli.checkpoint import Checkpoint

Owners = dict[str, tuple[QuantLayer, str]]
"""The layer of each tensor, and the layer's name for it."""

_CPU = torch.device("cpu")
_COLUMNS = 256  # no check of values depends on the number of columns, except a linear layer's own


class ValuesAsLoaded:
    """The quantized layers of another library's checkpoint, whose values ``find_problems`` checks.

    ``refusal``: why they don't fit the model that the config describes; empty if they do, or if there is no model.
    """

    def __init__(self, checkpoint: Checkpoint, contents: Contents) -> None:
        """``contents``: those of ``checkpoint``, used if no model can be built for it."""
        self.refusal = ""
        try:
            found = checkpoint.match()
            self._contents, self._owners = found.contents, found.owners
            contents.notes = found.contents.notes  # including those about the model
        except (CheckpointError, ImportError) as error:
            if not isinstance(error, UnknownModel | ImportError):
                self.refusal = str(error)
            self._contents, self._owners = contents, find_owners(contents)

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """The tensors in the files that are read."""
        contents, checked = self._contents, set(self._contents.checked_names)
        return {
            name: tensor
            for name, tensor in contents.stored.items()
            if name in checked or contents.is_source_of(name, self._owners)
        }

    def find_problems(self, advance: Callable[[float], object]) -> list[str]:
        """The errors that ``load_quantized`` would raise."""
        found: list[CheckpointError] = []
        try:
            check_unheld(self._contents, advance, found.append)
            for target, value in read_converted(self._contents, _CPU, advance, self._owners, found.append):
                if target.name in self._owners:
                    self._contents.check_value(target, *self._owners[target.name], value, found.append)
        except CheckpointError as error:
            found.append(error)
        return [str(error) for error in found]


def find_owners(contents: Contents) -> Owners:
    """The layer of each quantized tensor in ``contents``, and the layer's name for it, by the layers' schemes."""
    layers: dict[str, QuantLayer] = {}
    owners: Owners = {}
    for name, tensor in contents.headers.items():
        module, leaf = split_name(name)
        scheme = contents.manifest.layers.get(module)
        if scheme is None:
            continue
        experts = next((each for each in QuantExperts.weight_names if leaf.startswith(each)), None)
        layer = module if experts is None else f"{module}.{experts}"
        if layer not in layers:
            K = _COLUMNS if experts else _columns(contents, module, tensor)
            layers[layer] = _layer_of(scheme.of(leaf), K)
        own = leaf if experts is None else f"weight{leaf.removeprefix(experts)}"
        if own in layers[layer].fixed_names:
            owners[name] = layers[layer], own
    return owners


def _layer_of(scheme: QuantScheme, K: int) -> QuantLayer:
    try:
        return meta_linear(scheme, K, _COLUMNS)
    except ValueError:  # not with this number of columns
        return meta_linear(scheme, _COLUMNS, _COLUMNS)


def _columns(contents: Contents, module: str, tensor: StoredTensor) -> int:
    if module in contents.shapes:
        return contents.shapes[module][1]
    weight = contents.headers.get(f"{module}.weight", tensor)
    return contents.manifest.in_features.get(module, weight.shape[-1] if weight.shape else _COLUMNS)
