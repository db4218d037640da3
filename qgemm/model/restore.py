"""``restored_on_failure``: restores a model whose quantization fails half-way, if there is enough memory.

Every module's state is recorded: its class, its attributes, and its parameters, buffers, children and hooks. These are
references, which keep float layers alive that the model no longer contains. So at its peak, memory holds the float
model, the quantized layers, and copies of values that methods change in place. If there isn't enough room, nothing is
kept.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.device import free_memory
from qgemm.model.offloading import is_offloaded, stores_of

_OWN = frozenset(vars(nn.Module()))


@contextmanager
def restored_on_failure(model: nn.Module) -> Iterator[WayBack]:
    """Inside, any exception restores ``model`` to its state at the beginning, if ``keep_if_room`` found enough room."""
    way_back = WayBack(model)
    try:
        yield way_back
    except BaseException:
        if way_back.is_kept:
            way_back.restore()
        way_back.drop()  # because the traceback keeps it alive
        raise


class WayBack:
    """The recorded state of a model. ``is_kept``: whether it can still be restored while it is changed."""

    is_kept: bool = False

    def __init__(self, model: nn.Module) -> None:
        """Records ``model`` as it is now. Values are recorded at ``keep_if_room``."""
        self._model = model
        self._modules: list[tuple[nn.Module, type[nn.Module], dict[str, Any], dict[str, Any]]] = [
            (module, type(module), dict(vars(module)), _contents(module))
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # whose state isn't Python's, and which nothing changes
        ]
        self._stores = [(store, dict(store), names, list(names)) for store, names in stores_of(model)]
        self._copies: list[tuple[Tensor, Tensor]] = []

    def keep_if_room(self, layers: Iterable[str], *, changes_values: bool, runs_model: bool) -> None:
        """Decides, by the free memory, whether the model can be restored. Must be called before anything changes.

        - ``layers``: the names of the layers that will be quantized.
        - ``changes_values``: whether float values may be changed in place; if so, they are copied.
        - ``runs_model``: whether the model runs meanwhile.

        Half of the free memory is left to methods and runs, if there are any.
        """
        held = (contents[kind].values() for *_, contents in self._modules for kind in ("_parameters", "_buffers"))
        tensors = {id(t): t for values in held for t in values if t is not None and not t.is_meta}
        copied = [t for t in tensors.values() if changes_values or not isinstance(t, nn.Parameter)]
        needed = self._bytes_of_layers(layers)
        for tensor in copied:
            needed[tensor.device] += tensor.nbytes
        share = 2 if changes_values or runs_model else 1
        self.is_kept = all(share * count <= free_memory(device) for device, count in needed.items())
        if self.is_kept:
            self._copies = [(tensor, tensor.detach().clone()) for tensor in copied]
        else:
            self.drop()

    def restore(self) -> None:
        """Restores everything, in place; allocates nothing."""
        for module, kind, attributes, contents in self._modules:
            if type(module) is not kind:
                module.__class__ = kind  # for attention that was opened
            own = vars(module)
            own.clear()
            own.update(attributes)
            # In the same dictionaries, which handles of hooks refer to and quantized layers share.
            for name, content in contents.items():
                own[name].clear()
                own[name].update(content)
        for store, entries, names, known in self._stores:
            store.clear()
            store.update(entries)
            names[:] = known
        for tensor, values in self._copies:
            tensor.data.copy_(values)

    def drop(self) -> None:
        """Frees what was recorded."""
        self._modules, self._stores, self._copies, self.is_kept = [], [], [], False

    def _bytes_of_layers(self, names: Iterable[str]) -> Counter[torch.device]:
        """The bytes that quantized layers add to the float ones, by device, and the working space of the largest."""
        quantized: Counter[torch.device] = Counter()
        largest: Counter[torch.device] = Counter()
        for name in names:
            module = self._model.get_submodule(name)
            home = torch.device("cpu") if is_offloaded(module) else None
            sizes: Counter[torch.device] = Counter()
            for parameter in module.parameters(recurse=False):
                device = home or parameter.device
                quantized[device] += 17 * parameter.numel() // 16  # at most a byte per weight, plus scales and the like
                sizes[device] += parameter.nbytes
            largest |= sizes
        return Counter({device: n for device, n in (quantized + largest).items() if device.type != "meta"})


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copies of the dictionaries and sets that PyTorch keeps for a module: parameters, children, hooks and so on."""
    return {n: copy.copy(v) for n, v in vars(module).items() if n in _OWN and isinstance(v, dict | set)}
