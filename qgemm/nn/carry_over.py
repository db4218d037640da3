"""What a quantized linear layer takes over from the float one that it replaces, apart from weight and bias.

That is what others have added: hooks, child modules (adapters, observers), buffers, and attributes of the instance. A
layer stays in float if one of these has a name that a quantized layer needs itself.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from qgemm.nn.kinds import KINDS
from qgemm.nn.linear_layer import is_conv1d
from qgemm.nn.quant_layer import QuantLayer

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
# accelerate's attributes are handled together with its hooks; a compiled call belongs to the float layer.
_LEFT = frozenset({*vars(nn.Module()), "forward", "_hf_hook", "_old_forward", "_compiled_call_impl"})
_SAME = frozenset({"in_features", "out_features"})


def cannot_be_carried(linear: nn.Module) -> str:
    """Why a quantized layer can't take over everything that ``linear`` has; empty if it can."""
    if own := sorted(set(linear._parameters) - {"weight", "bias"}):
        return f"it has parameters of its own ({', '.join(own)})"
    needed = _names_needed()
    taken = [name for name in (*_attributes(linear), *linear._buffers, *linear._modules) if name in needed]
    return f"its {taken[0]!r} has a name that a quantized layer needs" if taken else ""


def carry_over(module: nn.Module, quantized: QuantLayer) -> None:
    """Gives ``quantized`` the hooks of ``module``, and for a linear layer also its children, buffers and attributes.

    They are shared, not copied.
    """
    share_hooks(module, quantized)
    if isinstance(quantized, KINDS):
        quantized.of_conv1d = module.of_conv1d if isinstance(module, KINDS) else is_conv1d(module)
        own = _names_needed() if isinstance(module, QuantLayer) else ()
        vars(quantized).update({name: value for name, value in _attributes(module).items() if name not in own})
        quantized._modules.update(module._modules)
        quantized._buffers.update(module._buffers)
        quantized._non_persistent_buffers_set |= module._non_persistent_buffers_set


def share_hooks(module: nn.Module, other: nn.Module) -> None:
    """Gives ``other`` the hooks of ``module``, whose place it takes."""
    for hooks in _HOOKS:
        # The dictionary itself, because a handle looks there to remove its hook.
        vars(other)[hooks] = vars(module)[hooks]


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _LEFT and name not in _SAME}


@functools.cache  # called for every layer of a model
def _names_needed() -> set[str]:
    names = {name for kind in KINDS for name in dir(kind)} - set(dir(nn.Module))
    return names.union(*(vars(base).get("__annotations__", ()) for kind in KINDS for base in kind.__mro__)) - _SAME
