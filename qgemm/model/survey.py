"""``find_layers``: the layers of a model that multiply by a weight, and why some of them must stay in float.

What a user would see as a linear layer is listed once, with all its names, whether it can be swapped or not. Nothing
here keeps a module or a tensor after the call, and transformers is recognised without importing it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from qgemm.model.held_weights import multiplied_parameters
from qgemm.model.swap_rules import find_rule, modules_around
from qgemm.nn.attention import why_closed
from qgemm.nn.carry_over import cannot_be_carried
from qgemm.nn.float_experts import UnknownExperts, describe_experts
from qgemm.nn.linear_layer import linear_weight
from qgemm.numerics.formats import FLOAT_DTYPES, INT8
from qgemm.scheme import QuantScheme

_SWAPPED = {
    ("torch.nn.modules.linear", "Linear"),
    ("transformers.pytorch_utils", "Conv1D"),
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"),
}
# Names of layers that map to the vocabulary; and of those that map to it or to classes at the end of a model.
_VOCABULARY_HEADS = ("lm_head", "lm_heads")
_HEADS = ("head", "heads", "classifier", "classifiers", "output_projection")
_OTHER_PRODUCTS = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear)
# Convolutions aren't counted; the other classes' weights aren't multiplied as matrices.
_NO_PRODUCTS = (nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)
# For parameters that modules hold themselves: smaller ones are biases, tables or routers of a few experts.
_SMALLEST_HELD = 4096


@dataclass
class Layer:
    """One layer: its names (the first counts), its class, its parameters' bytes, and why it stays in float.

    - ``bytes``: parameters shared with an earlier layer count there.
    - ``reason``: why it stays in float; empty for a layer that is to be swapped.
    - ``obstacle``: why it can't be swapped, whatever a user wants; empty if ``reason`` is a choice (an output head) or
      a caution (a rule).
    - ``is_experts``: whether it holds fused experts. If their layout is unknown, each of their weights is listed
      separately.
    - ``is_wish``: whether ``reason`` is the user's wish.
    """

    names: list[str]
    kind: str
    bytes: int
    reason: str
    obstacle: str = ""
    is_experts: bool = False
    is_wish: bool = False

    @property
    def name(self) -> str:
        """The name that errors and reports use."""
        return self.names[0]

    def scheme_for(self, scheme: QuantScheme) -> QuantScheme:
        """The scheme that it gets where ``scheme`` is wanted; raises ``ValueError`` if that is for experts alone."""
        if scheme.down is not None and not self.is_experts:
            raise ValueError(
                f"scheme is {scheme.name!r}, which is for experts alone, and {self.name} is linear: give each its own, "
                f'as {{"*.experts": {scheme.name!r}, "*": {scheme.parts[0].name!r}}}'
            )
        return scheme.for_experts() if self.is_experts else scheme


def find_layers(model: nn.Module) -> list[Layer]:
    """The layers of ``model``, in its order."""
    survey = _Survey(model)
    return [layer for name, module in model.named_modules() for layer in survey.layers_at(name, module)]


class _Survey:
    """What must be known about the whole model to judge one layer. Modules and parameters are identified by ``id``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: dict[int, list[str]] = defaultdict(list)
        self.holders: dict[int, list[str]] = defaultdict(list)
        self.heads: set[int] = set()
        self.kept_in_fp32: set[str] = set()
        self.counted: set[int] = set()
        self.multiplied: dict[type[nn.Module], frozenset[str] | None] = {}
        self.base_parts: dict[int, set[int]] = {}
        dtypes: set[torch.dtype] = set()
        for name, module in model.named_modules():
            # Not named_children(), which lists a module with two names only once.
            for child_name, child in module._modules.items():
                self.names[id(child)].append(f"{name}.{child_name}" if name else child_name)
            for parameter in module.parameters(recurse=False):
                self.holders[id(parameter)].append(name)
            if (head := _output_head(module)) is not None:
                self.heads.add(id(head))
            for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
                self.kept_in_fp32.update(getattr(module, attribute, None) or ())
            if _is_linear(module):
                dtypes.update(parameter.dtype for parameter in module.parameters(recurse=False))
        self.heads.update(id(head) for head in _heads_by_name(model))
        self.is_half = not dtypes.isdisjoint((torch.float16, torch.bfloat16))

    def layers_at(self, name: str, module: nn.Module) -> Iterator[Layer]:
        """The layers that ``module`` itself is or holds."""
        names = [name, *(other for other in self.names[id(module)] if other != name)]
        kind = type(module).__name__
        parameters = dict(module.named_parameters(recurse=False))
        if _is_linear(module):
            yield Layer(names, kind, self._bytes(_own_parameters(module)), *self._reason(names, module))
        elif isinstance(module, (nn.MultiheadAttention, *_OTHER_PRODUCTS)):
            is_attention = isinstance(module, nn.MultiheadAttention)
            reason = why_closed(module) if is_attention else f"there is no quantized {kind}"
            yield Layer(names, kind, self._bytes(_own_parameters(module)), reason, reason)
        elif fused := [key for key, parameter in parameters.items() if _is_fused(name, kind, key, parameter)]:
            try:
                describe_experts(module)
            except UnknownExperts as error:
                reason = f"fused experts: {error}"
                yield from self._held(names, kind, {key: parameters[key] for key in fused}, reason, is_experts=True)
            else:
                size = self._bytes(parameters.values())
                yield Layer(names, kind, size, *self._reason(names, module), is_experts=True)
        elif not isinstance(module, _NO_PRODUCTS):
            held = {key: parameter for key, parameter in parameters.items() if _may_be_multiplied(key, parameter)}
            reason = f"no layer holds it: {kind} multiplies by it itself"
            yield from self._held(names, kind, self._multiplied(type(module), held), reason)

    def _held(
        self, names: list[str], kind: str, held: dict[str, nn.Parameter], reason: str, is_experts: bool = False
    ) -> Iterator[Layer]:
        for key, parameter in held.items():
            aliases = [f"{alias}.{key}" if alias else key for alias in names]
            yield Layer(aliases, kind, self._bytes([parameter]), reason, reason, is_experts)

    def _multiplied(self, cls: type[nn.Module], held: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The ``held`` parameters that the code of ``cls`` multiplies by; all of them if the code can't be read."""
        if held and cls not in self.multiplied:
            self.multiplied[cls] = multiplied_parameters(cls)
        keys = self.multiplied.get(cls)
        return held if keys is None else {key: parameter for key, parameter in held.items() if key in keys}

    def _bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        new = {id(parameter): parameter for parameter in parameters if id(parameter) not in self.counted}
        self.counted.update(new)
        return sum(parameter.nbytes for parameter in new.values())

    def _parts_of_base(self, pretrained: nn.Module) -> set[int]:
        if id(pretrained) not in self.base_parts:
            self.base_parts[id(pretrained)] = {id(part) for part in _base_model(pretrained).modules()}
        return self.base_parts[id(pretrained)]

    def _reason(self, names: list[str], module: nn.Module) -> tuple[str, str]:
        """Why a linear layer, or experts, stay in float, and why they must; each empty if there is no such reason."""
        if own := _own_reason(module):
            return own, own
        reasons = [found for name in names for found in self._reasons_at(name, module)]
        obstacles = [reason for reason, must_stay in reasons if must_stay]
        return next((reason for reason, _ in reasons), ""), next(iter(obstacles), "")

    def _reasons_at(self, name: str, module: nn.Module) -> Iterator[tuple[str, bool]]:
        """The reasons that keep the layer ``name`` in float, the most important first, and whether it must stay."""
        if not name:
            yield "it is the model itself: put it into a module, such as nn.Sequential", True
            return
        around = modules_around(self.model, name)
        if isinstance(around[0][0], nn.MultiheadAttention):
            yield "its weight is read by the attention around it", True
        if any(id(part) in self.heads for part in (module, *(holder for holder, _ in around))):
            yield "output head", False
        for key, parameter in module.named_parameters(recurse=False):
            others = [holder for holder in self.holders[id(parameter)] if holder not in self.names[id(module)]]
            if others:
                yield f"it shares its {key} with {others[0]}", True
        # The nearest PreTrainedModel decides: a vision tower beside the base model isn't a task head.
        owner = next((holder for holder, _ in around if getattr(holder, "base_model_prefix", "")), None)
        if owner is not None and id(module) not in self._parts_of_base(owner):
            yield "task head, outside the base model", False
        if self.is_half and all(parameter.dtype == torch.float32 for parameter in module.parameters()):
            if is_kept_in_fp32(name, self.kept_in_fp32):
                yield "the model keeps it in float32", False
        if (rule := find_rule(around)) is not None:
            yield rule.reason, False


def is_kept_in_fp32(name: str, kept: Iterable[str]) -> bool:
    """Whether a part of the dotted ``name`` is in ``kept``, the list that a transformers model keeps in float32."""
    return any(re.search(rf"(^|\.){part}(\.|$)", name) for part in kept)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The module's own parameters, and those from which its parametrizations compute them."""
    yield from module.parameters(recurse=False)
    if is_parametrized(module):
        yield from module.parametrizations.parameters()  # type: ignore[union-attr]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _qualified_name(module) in _SWAPPED


def _qualified_name(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def _output_head(module: nn.Module) -> nn.Module | None:
    get = getattr(module, "get_output_embeddings", None)
    try:
        return get() if callable(get) else None
    except NotImplementedError:
        return None


def _heads_by_name(model: nn.Module) -> Iterator[nn.Module]:
    """The last linear layer in each module that has an output head's name and function."""
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    top = model
    while len(top._modules) == 1 and (only := next(iter(top._modules.values()))) is not None and only._modules:
        top = only  # the content of a wrapper
    for module in model.modules():
        for name, child in module._modules.items():
            if child is None or name not in (*_VOCABULARY_HEADS, *_HEADS):
                continue
            # In a transformers model, such a name may mean a pooling head; the model tells its output head itself.
            is_at_the_end = module is top and not hasattr(module, "base_model_prefix")
            for part in child if isinstance(child, nn.ModuleList) else [child]:
                last = next((layer for layer in reversed(list(part.modules())) if _is_linear(layer)), None)
                if last is not None and not any(map(is_lazy, last.parameters())):
                    if name in _VOCABULARY_HEADS or is_at_the_end or linear_weight(last).shape[0] in sizes:
                        yield last


def _base_model(pretrained: nn.Module) -> nn.Module:
    # As in PreTrainedModel.base_model: a model without that attribute is its own base.
    body = getattr(pretrained, str(pretrained.base_model_prefix), pretrained)
    return body if isinstance(body, nn.Module) else pretrained


def _own_reason(module: nn.Module) -> str:
    if hasattr(module, "parametrizations"):
        return "it is parametrized"
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return "it has no weight before its first call: run the model once"
    if _is_linear(module):
        if _qualified_name(module) not in _SWAPPED:
            return "a subclass of nn.Linear, which may compute something else"
        if "weight" not in module._parameters:
            return "its weight is computed from others (weight norm, spectral norm, pruning)"
        if reason := cannot_be_carried(module):
            return reason
    # accelerate also replaces forward, but its hooks are checked separately, and it restores the class's own.
    forward = vars(module).get("forward")
    if forward is not None and not hasattr(module, "_hf_hook"):
        if getattr(forward, "__func__", None) is not type(module).forward:
            return "its forward was replaced"
    if _is_linear(module):
        return _weight_reason(linear_weight(module), linear_weight(module).shape[1])
    source = describe_experts(module)
    widths = {"gate_up_proj": source.hidden_size, "down_proj": source.intermediate_size}
    reasons = (_weight_reason(module.get_parameter(source.parameters[name]), widths[name]) for name in widths)
    return next(filter(None, reasons), "")


def _weight_reason(weight: Tensor, in_features: int) -> str:
    if type(weight.data) is not Tensor:
        return f"its weight is a {type(weight.data).__name__}"
    if weight.dtype not in FLOAT_DTYPES:
        return f"its weight is {weight.dtype}, not float32, bfloat16 or float16"
    if weight.numel() == 0:
        return "its weight is empty"
    if in_features > INT8.max_k:
        return f"in_features is {in_features}; int32 sums hold up to {INT8.max_k}"
    return ""


def _is_fused(name: str, kind: str, key: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter may hold the weights of several experts: in three dimensions, or one below the other."""
    if is_lazy(parameter) or "bias" in key:
        return False
    if parameter.ndim == 3:
        return "expert" in f"{name}.{kind}".lower()
    is_router = "router" in kind.lower() or "gate" in kind.lower()
    return parameter.ndim == 2 and "expert" in kind.lower() and not is_router and _may_be_multiplied(key, parameter)


def _may_be_multiplied(key: str, parameter: nn.Parameter) -> bool:
    if is_lazy(parameter) or "bias" in key:
        return False
    return parameter.ndim in (2, 3) and parameter.is_floating_point() and parameter.numel() >= _SMALLEST_HELD
