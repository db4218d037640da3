"""``fingerprint(model)`` changes with everything that is built into a captured graph of the model."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn
from transformers import PreTrainedModel

_PLAIN = frozenset((bool, int, float, str, type(None)))
# A module's own attributes are examined one by one; the attention of a call is the caller's responsibility.
_LEFT_OUT = frozenset((*vars(nn.Module()), "_attn_implementation_internal"))
MAX_VALUES = 64
"""The maximum length of a list or a dictionary: longer ones are tables, compared by identity only."""


def fingerprint(model: PreTrainedModel) -> Hashable:
    """Attributes of modules and the config: numbers and strings, also in lists and dictionaries; others by identity.

    For modules, also the class, hooks, and addresses of tensors. It takes about 4 us per module. Changes inside other
    objects aren't noticed.
    """
    config = model.config
    configs = {id(each): each for each in (config, config.get_text_config(decoder=True))}
    return (*map(_of_attributes, configs.values()), *map(_of, model.modules()))


def _of(module: nn.Module) -> Hashable:
    return (
        id(type(module)),
        module.training,
        _of_attributes(module),
        *[parameter.data_ptr() for parameter in module._parameters.values() if parameter is not None],
        *[buffer.data_ptr() for buffer in module._buffers.values() if buffer is not None],
        *module._forward_hooks,
        *module._forward_pre_hooks,
    )


def _of_attributes(owner: object) -> Hashable:
    return tuple([_of_value(value) for name, value in vars(owner).items() if name not in _LEFT_OUT])


def _of_value(value: object) -> Hashable:
    if type(value) in _PLAIN:
        return value  # type: ignore[return-value]
    if isinstance(value, dict) and len(value) <= MAX_VALUES:
        return (*map(_of_item, value), *map(_of_item, value.values()))
    if isinstance(value, (list, tuple, set)) and len(value) <= MAX_VALUES:
        return tuple(map(_of_item, value))
    return id(value)


def _of_item(item: object) -> Hashable:
    return item if type(item) in _PLAIN else id(item)  # type: ignore[return-value]
