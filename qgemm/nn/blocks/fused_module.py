"""``FusedModule``: what layers and blocks that compute past their own modules have in common.

They compute only where nobody would notice, apart from the time that it takes: no gradients, no training, no hooks on
modules that aren't called, and still the modules that they were fused with.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.modules.module as _of_all_modules
from torch import Tensor, nn

from qgemm.nn.blocks.binding import has_own_forward
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.ops.direct import in_forward_mode, is_exporting
from qgemm.warn import warn_user

Places = tuple[tuple[nn.Module, str, nn.Module], ...]
"""Modules, with the holder and name of each."""


@dataclass(frozen=True, eq=False)
class FusedModule(ABC):
    """How a module with layers inside computes.

    ``passed_over``: modules that are not called, with the holder and name of each, so that a replacement is noticed;
    ``called``: those that are called, likewise.
    """

    passed_over: Places = field(default=(), kw_only=True)
    called: Places = field(default=(), kw_only=True)

    @property
    @abstractmethod
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of all products."""

    def separate(self) -> None:
        """Gives all layers memory of their own again."""
        for product in self.products:
            product.separate()

    def is_plain_call(self, module: nn.Module, x: Any, context: Mapping[str, Any]) -> bool:
        """Whether a call of ``module`` needs no gradients, and no global hook sees every module's call."""
        if type(x) is not Tensor or module.training:
            return False
        if torch.is_grad_enabled() and _has_gradients(module, x, context):
            if not torch.compiler.is_compiling():
                warn_of_gradients()
            return False
        if _of_all_modules._global_forward_hooks or _of_all_modules._global_forward_pre_hooks or in_forward_mode():
            return False
        return not torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")

    def has_its_modules(self) -> bool:
        """Whether it still has the modules that it was fused with, and nobody watches one that isn't called."""
        for holder, name, module in self.passed_over:
            if holder._modules.get(name) is not module or module.training:
                return False
            if (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__) and (
                _is_watched(module)
            ):
                if "_hf_hook" in module.__dict__:  # accelerate may have moved weights to free this memory
                    for merged in self.products:
                        merged.let_go()
                return False
        if is_exporting():
            return False  # an exported program contains the model's own parameters, each once
        return all(holder._modules.get(name) is module for holder, name, module in self.called)

    def watched(self) -> tuple[nn.Module, ...]:
        """The bypassed modules whose calls others watch; because of them it computes as its class does."""
        return tuple(module for _, _, module in self.passed_over if _is_watched(module))


@functools.cache  # once: looking for the user's line takes longer than a small layer
def warn_of_gradients() -> None:
    """Warns that fusion saves no time where gradients are recorded."""
    warn_user(
        "a fused model is called with gradients on, so its layers run one part after the other, as without fusion: "
        "unless you need gradients, call it under torch.inference_mode() or torch.no_grad()"
    )


def _has_gradients(module: nn.Module, x: Tensor, context: Mapping[str, Any]) -> bool:
    """Whether a backward pass may go through ``module``: quantized rows have no gradient."""
    if x.requires_grad or any(parameter.requires_grad for parameter in module.parameters()):
        return True
    # Keys in a cache may be trained.
    layers = [each for value in context.values() for each in getattr(value, "layers", ())]
    tensors = [*context.values(), *(value for each in layers for value in vars(each).values())]
    return any(isinstance(value, Tensor) and value.requires_grad for value in tensors)


def _is_watched(module: nn.Module) -> bool:
    """Whether others would see a call of ``module``, or have replaced its ``forward``."""
    if module._forward_pre_hooks or has_own_forward(module):
        return True
    return any(map(_is_active, module._forward_hooks.values()))


def _is_active(hook: Any) -> bool:
    """Whether a hook does anything: transformers' own only record what was asked for, such as router logits."""
    if getattr(hook, "__name__", "") != "output_capturing_hook" or torch.compiler.is_compiling():
        return True
    collector = hook.__globals__.get("_active_collector")
    if collector is not None and not (collected := collector.get()):
        return False
    own = inspect.getclosurevars(hook).nonlocals
    return collector is None or "key" not in own or own["key"] in collected
