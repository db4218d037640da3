"""The tensors of a model by name: which of them a checkpoint stores, and which are the same."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.nn import QuantLayer
from qgemm.numerics.formats import FLOAT_DTYPES as COMPUTED_DTYPES


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of ``model``, under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def transient_names(model: nn.Module) -> set[str]:
    """The names of the buffers that ``state_dict`` leaves out, such as rotary frequencies and masks."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what ``torch.compile`` and PyTorch's data parallelism return."""
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or "_orig_mod" in model._modules:
        model = model._orig_mod if "_orig_mod" in model._modules else model.module  # type: ignore[assignment]
    return model


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a checkpoint stores: all except the integer buffers that ``state_dict`` leaves out.

    Those are masks and positions, which are made again when the model is built. Float ones are kept, because casting a
    model rounds them: a bfloat16 model loaded without them would not give the same output bit for bit.
    """
    transient = transient_names(model)
    return {
        name: tensor
        for name, tensor in named_tensors(model).items()
        if name not in transient or tensor.is_floating_point()
    }


def find_ties(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, str]:
    """For names in ``tensors`` of ``model`` whose memory has another name: that other name.

    That is the first name, except for tensors that transformers ties to another one: another class of the model, which
    may lack its head, looks for the embedding's name.

    The same memory means the same storage with the same view: tensors that only overlap are stored separately. On meta,
    where there is no memory, and for subclasses (DTensor), whose memory is elsewhere, it means the same tensor object.
    """
    first: dict[tuple[object, ...], str] = {}
    ties = {}
    known = getattr(model, "all_tied_weights_keys", None) or {}
    for name, tensor in sorted(tensors.items(), key=lambda each: each[0] in known):
        if tensor.numel() == 0:
            continue  # it has no address that distinguishes it from others
        if tensor.device.type == "meta" or type(tensor.detach()) is not Tensor:
            place: tuple[object, ...] = (id(tensor),)
        else:
            storage = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
            place = (tensor.device, tensor.dtype, *storage, tensor.shape, tensor.stride())
        stored = first.setdefault(place, name)
        if stored != name:
            ties[name] = stored
    return ties


def split_name(name: str) -> tuple[str, str]:
    """``"a.b.weight"`` as ``("a.b", "weight")``."""
    module, _, tensor = name.rpartition(".")
    return module, tensor


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    """The module ``name`` in ``model``; None if there is none, or for the model itself, whose name is empty."""
    try:
        return model.get_submodule(name) if name else None
    except AttributeError:
        return None


def is_beyond(model: nn.Module, name: str) -> bool:
    """Whether the module ``name`` is in a list of ``model`` with fewer modules, as with ``num_hidden_layers=2``."""
    module = model
    for part in name.split("."):
        if (child := module._modules.get(part)) is None:
            return isinstance(module, nn.ModuleList) and part.isdigit()
        module = child
    return False


def get_tensor(model: nn.Module, name: str) -> Tensor:
    """The parameter, buffer or module ``name``; raises ``AttributeError`` if there is none."""
    owner, leaf = split_name(name)
    module = model.get_submodule(owner)
    # In a quantized layer, the attribute is a view of the parameter.
    tensor: Tensor = module.stored(leaf) if isinstance(module, QuantLayer) else getattr(module, leaf)
    return tensor


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replaces the tensor ``name`` of ``model`` by ``tensor``."""
    owner, leaf = split_name(name)
    setattr(model.get_submodule(owner), leaf, tensor)


def forget_ties(model: nn.Module, layers: Container[str], tied: Container[str]) -> None:
    """Keeps transformers from tying quantized layers of ``model`` that files hold separately, such as a head.

    ``layers``: the names of quantized layers. ``tied``: the aliases in the checkpoint. transformers would compare the
    layer's weight with an embedding's, or replace it by that; the config then says that nothing is tied.
    """
    pretrained: Any = model
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    owners = {alias: (split_name(alias)[0], split_name(name)[0]) for alias, name in ties.items()}
    apart = [alias for alias, own in owners.items() if alias not in tied and any(each in layers for each in own)]
    for alias in apart:
        del ties[alias]
    head = pretrained.get_output_embeddings() if apart else None
    if head is not None and any(find_module(model, owners[alias][0]) is head for alias in apart):
        for part in (pretrained.config, pretrained.config.get_text_config(decoder=True)):
            part.tie_word_embeddings = False


FLOAT_DTYPES = (*COMPUTED_DTYPES, torch.float64)
"""The dtypes that may replace one another in a model's float part: a checkpoint's dtype is kept."""

BIAS_DTYPES = COMPUTED_DTYPES
"""The dtypes that a quantized layer's bias may have: kernels accept no others."""


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``, as configs have it."""
    return str(dtype).removeprefix("torch.")
