"""Layers whose weights accelerate moves while the model runs: ``device_map``, ``cpu_offload``, ``dispatch_model``.

accelerate attaches a hook to every module with weights (``_hf_hook``) and wraps the module's ``forward``. An offloaded
module has its weights on meta. Before each call, its hook copies them from a mapping (``weights_map``) to the device
that computes, and drops them afterwards. To quantize such a layer, its weights are loaded as for a call, and the
quantized ones replace them in that mapping, with a hook like the old one on the new layer.

If a module has such a hook, accelerate is already imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from qgemm.model.selection import listed

_SETTINGS = ("execution_device", "offload", "io_same_device", "weights_map", "offload_buffers", "skip_keys")


@contextmanager
def weights_at_hand(module: nn.Module) -> Iterator[None]:
    """Inside, an offloaded module has its weights on the device where it runs; a module without hooks is unchanged."""
    with ExitStack() as stack:
        for hook in _hooks(module):
            if hook.offload:
                hook.pre_forward(module)
                stack.callback(hook.post_forward, module, None)
        yield


def carry_hooks(module: nn.Module, quantized: nn.Module) -> None:
    """Moves the hooks of ``module`` to ``quantized``, which replaces it, and offloads that if ``module`` was offloaded.

    The float weights are removed from their mapping.
    """
    hooks = _hooks(module)
    if not hooks:
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # type: ignore[import-untyped]

    values = {name: parameter.detach() for name, parameter in quantized.named_parameters(recurse=False)}
    for hook in hooks:
        if hook.offload:
            found = _find_store(hook)
            assert found is not None, "check_hooks was to refuse this"
            store, prefix, names = found
            for name, _ in module.named_parameters(recurse=False):
                del store[prefix + name]
                names.remove(prefix + name)
            for name, value in values.items():
                store[prefix + name] = value.to("cpu")
                names.append(prefix + name)
        add_hook_to_module(
            quantized,
            AlignDevicesHook(**{name: getattr(hook, name) for name in _SETTINGS}),
            append=True,
        )


def is_offloaded(module: nn.Module) -> bool:
    """Whether a module's weights are stored elsewhere until it is called."""
    return any(hook.offload for hook in _hooks(module))


def stores_of(model: nn.Module) -> list[tuple[MutableMapping[str, Tensor], list[str]]]:
    """The dictionaries in memory with the weights of offloaded modules, each with accelerate's list of their names."""
    found = [_find_store(hook) for module in model.modules() for hook in _hooks(module) if hook.offload]
    return list({id(store): (store, names) for store, _, names in filter(None, found)}.values())


def check_hooks(model: nn.Module, names: Iterable[str]) -> None:
    """Raises ``ValueError`` if a layer among ``names`` has hooks that can't be moved to its replacement."""
    unknown, on_disk, preloaded = [], [], []
    wholes = [
        name
        for name, module in model.named_modules()
        if any(hook.offload and hook.place_submodules for hook in _hooks(module))
    ]
    for name in names:
        module = model.get_submodule(name)
        if any(whole == "" or name == whole or name.startswith(f"{whole}.") for whole in wholes):
            preloaded.append(name)
        elif not all(_is_understood(hook) for hook in _flatten(getattr(module, "_hf_hook", None))):
            unknown.append(name)
        elif any(hook.offload and _find_store(hook) is None for hook in _hooks(module)):
            on_disk.append(name)
    if on_disk:
        raise ValueError(
            f"accelerate keeps the weights of {listed(on_disk)} on disk, in files that qgemm doesn't change. Quantize "
            "the checkpoint instead, with qgemm.quantize_checkpoint, and load the result with the same device_map"
        )
    if preloaded:
        raise ValueError(
            f"accelerate loads the weights of {listed(preloaded)} together with those of a module around them: "
            "dispatch the model without preload_module_classes, or quantize it before"
        )
    if unknown:
        raise ValueError(
            f"a swap would lose hooks of accelerate on {listed(unknown)} that do more than align devices. Quantize "
            "before they are added, or call accelerate.hooks.remove_hook_from_submodules(model) first"
        )


def _flatten(hook: Any) -> list[Any]:
    if type(hook).__name__ == "SequentialHook":
        return [inner for part in hook.hooks for inner in _flatten(part)]
    return [] if hook is None else [hook]


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in _flatten(getattr(module, "_hf_hook", None)) if _is_understood(hook)]


def _is_understood(hook: Any) -> bool:
    return type(hook).__name__ == "AlignDevicesHook"


def _find_store(hook: Any) -> tuple[MutableMapping[str, Tensor], str, list[str]] | None:
    """The dictionary in memory that a hook gets weights from, their prefix there, and accelerate's list of names.

    None if the weights are on disk.
    """
    weights_map, prefix = hook.weights_map, ""
    if type(weights_map).__name__ == "PrefixedDataset":
        weights_map, prefix = weights_map.dataset, weights_map.prefix
    names = list(weights_map)  # a copy that nobody reads, unless accelerate keeps a list
    if type(weights_map).__name__ == "OffloadedWeightsLoader":
        if any(key.startswith(prefix) for key in weights_map.index):
            return None
        weights_map, names = weights_map.state_dict, weights_map.all_keys
    return (weights_map, prefix, names) if isinstance(weights_map, MutableMapping) else None
