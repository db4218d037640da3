"""``fingerprint(model)`` changes with whatever a captured graph of the model has built in."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn
from transformers import PreTrainedModel

_PLAIN = frozenset((bool, int, float, str, type(None)))
# A module's own are looked at one by one; which attention a call has is its caller's affair.
_LEFT_OUT = frozenset((*vars(nn.Module()), "_attn_implementation_internal"))
MAX_VALUES = 64
"""Of a list or a dictionary: longer ones are tables, which an attribute has or hasn't."""


def fingerprint(model: PreTrainedModel) -> Hashable:
    """Attributes of modules and the config: numbers and strings, in lists and dictionaries too, others by identity.

    Of modules also the class, hooks, and addresses of tensors. About 4 us a module. Changes inside of other objects
    aren't seen.
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
