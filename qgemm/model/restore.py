"""``restored_on_failure``: a model whose quantization fails half-way is again what it was, if memory has room for that.

Every module of the model is written down: its class, its attributes, and which parameters, buffers, children and hooks
it has. These are references, which keep float layers alive that are out of the model already. So at its peak memory
holds the float model and the quantized layers, and copies of the values where methods change those in place. Where it
has no room for both, nothing is kept.
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
    """Inside, any exception puts ``model`` back to what it was at the beginning, once ``keep_if_room`` found room."""
    way_back = WayBack(model)
    try:
        yield way_back
    except BaseException:
        if way_back.is_kept:
            way_back.restore()
        way_back.drop()  # the traceback holds it
        raise


class WayBack:
    """What a model was. ``is_kept``: whether it can still be put back, now that it changes."""

    is_kept: bool = False

    def __init__(self, model: nn.Module) -> None:
        """``model``: as it is now. Its values are what they are at ``keep_if_room``."""
        self._model = model
        self._modules: list[tuple[nn.Module, type[nn.Module], dict[str, Any], dict[str, Any]]] = [
            (module, type(module), dict(vars(module)), _contents(module)) for module in model.modules()
        ]
        self._stores = [(store, dict(store), names, list(names)) for store, names in stores_of(model)]
        self._copies: list[tuple[Tensor, Tensor]] = []

    def keep_if_room(self, layers: Iterable[str], *, changes_values: bool, runs_model: bool) -> None:
        """To be called before anything changes: decides by the memory that is free whether there is a way back.

        - ``layers``: the names of those that will be quantized.
        - ``changes_values``: whether float values may be changed in place; they are copied then.
        - ``runs_model``: whether the model runs meanwhile.

        Half of the free memory is left to methods and runs, where there are any.
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
        """Puts all of it back, in place; allocates nothing."""
        for module, kind, attributes, contents in self._modules:
            if type(module) is not kind:
                module.__class__ = kind  # attention that was opened
            own = vars(module)
            own.clear()
            own.update(attributes)
            # The very dictionaries, which handles of hooks know, and quantized layers share.
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
        """Frees what is kept."""
        self._modules, self._stores, self._copies, self.is_kept = [], [], [], False

    def _bytes_of_layers(self, names: Iterable[str]) -> Counter[torch.device]:
        """What the quantized layers take beside the float ones, by device, with the working space of the largest."""
        quantized: Counter[torch.device] = Counter()
        largest: Counter[torch.device] = Counter()
        for name in names:
            module = self._model.get_submodule(name)
            home = torch.device("cpu") if is_offloaded(module) else None
            sizes: Counter[torch.device] = Counter()
            for parameter in module.parameters(recurse=False):
                device = home or parameter.device
                quantized[device] += 17 * parameter.numel() // 16  # a byte a weight, scales and the like; or less
                sizes[device] += parameter.nbytes
            largest |= sizes
        return Counter({device: n for device, n in (quantized + largest).items() if device.type != "meta"})


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copies of the dictionaries and sets that PyTorch keeps of a module: parameters, children, hooks and so on."""
    return {n: copy.copy(v) for n, v in vars(module).items() if n in _OWN and isinstance(v, dict | set)}
