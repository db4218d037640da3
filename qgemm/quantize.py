"""``quantize_model``: swaps the linear layers of a model for ``QuantLinear``, in place.

First every layer is looked at and everything is checked; only then is anything swapped, one layer at a time, each float
weight freed before the next is touched. So an error leaves the model as it was, and memory peaks at the float model
plus the working space of one layer. Between the two steps only names are kept: a reference to a layer would keep its
weight alive.

Exactly ``nn.Linear``, transformers' ``Conv1D`` and ``FalconLinear`` are swapped. Other subclasses of ``nn.Linear``
mean something of their own, and ``swap_rules.py`` lists where even a plain one can't go. Whatever stays in float is in
the report with its reason.
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qgemm.nn import QuantLinear
from qgemm.nn.linear import linear_weight
from qgemm.reporting import KEPT, LayerRecord, QuantReport, parameter_bytes
from qgemm.scheme import QuantScheme, resolve_scheme
from qgemm.survey import Layer, find_layers

Model = TypeVar("Model", bound=nn.Module)
Pattern: TypeAlias = "str | re.Pattern[str]"

_MANY = 5


def quantize_model(
    model: Model,
    scheme: str | QuantScheme = "int8",
    *,
    skip: Pattern | Iterable[Pattern] | None = None,
    input_scales: Mapping[str, float | Tensor] | None = None,
    progress: bool | None = None,
) -> Model:
    """Swaps the linear layers of ``model`` for ``QuantLinear``, in place, and returns ``model``.

    Output heads, layers that share their weight, and layers whose surroundings need a float weight stay as they are;
    ``qgemm.report(model)`` lists every layer with what was done or why not.

    - ``scheme``: a name from ``SCHEMES``, or a scheme.
    - ``skip``: layers to leave in float. A string is the dotted name of a layer, or of a module that contains layers;
      with ``*``, ``?`` or ``[`` in it, a glob over such names, in which ``*`` crosses dots. A compiled regular
      expression is searched for in the names of layers.
    - ``input_scales``: for a static scheme, the activation's scale of every layer to be swapped, by name.
    - ``progress``: whether to show a progress bar; None shows one on a terminal only.

    A transformers model is told of it, so that ``save_pretrained`` works; it gets a copy of its config.
    A model on the meta device gets the structure alone. Raises ``ValueError``, with the model unchanged, if there is
    nothing to swap, the model is quantized already, a pattern matches no layer, a weight holds NaN or Inf,
    ``input_scales`` doesn't fit, or a layer carries what a swap would lose (accelerate's offloading, state-dict hooks).
    """
    plan = plan_swaps(model, scheme, skip, input_scales)
    _check_finite(model, plan.chosen)
    records = {}
    for layer in tqdm(plan.chosen, desc="quantize", unit="layer", disable=None if progress is None else not progress):
        records[layer.name] = swap(model, layer, plan)
    model._qgemm_report = make_report(plan, records)  # type: ignore[assignment]
    _warn_of_experts(plan.layers)
    if _holds_pretrained(model):
        from qgemm.integrations.transformers import attach_quantizer

        attach_quantizer(model)
    return model


@dataclass(frozen=True)
class SwapPlan:
    """What is to become of every layer of a model. ``input_scales``: of the chosen layers, by name."""

    scheme: QuantScheme
    layers: list[Layer]
    input_scales: dict[str, float | Tensor]

    @property
    def chosen(self) -> list[Layer]:
        """The layers to be swapped."""
        return [layer for layer in self.layers if not layer.reason]


def plan_swaps(
    model: nn.Module,
    scheme: str | QuantScheme,
    skip: Pattern | Iterable[Pattern] | None,
    input_scales: Mapping[str, float | Tensor] | None,
) -> SwapPlan:
    """Looks at every layer and checks everything but the weights' values; raises as ``quantize_model`` does."""
    scheme = resolve_scheme(scheme)
    _check_not_quantized(model)
    layers = find_layers(model)
    _apply_skip(layers, skip)
    chosen = [layer for layer in layers if not layer.reason]
    if not chosen:
        raise ValueError(_nothing_to_swap(model, layers))
    _check_layers(model, chosen)
    return SwapPlan(scheme, layers, _check_input_scales(scheme, chosen, layers, input_scales))


def make_report(plan: SwapPlan, records: Mapping[str, LayerRecord]) -> QuantReport:
    """The report of a model, from the records of the layers that were swapped."""
    return QuantReport(tuple(records.get(layer.name) or _kept_record(layer) for layer in plan.layers))


def swap(model: nn.Module, layer: Layer, plan: SwapPlan) -> LayerRecord:
    """Puts a ``QuantLinear`` in the place of one layer of ``model``, under all its names."""
    scheme = plan.scheme
    linear = model.get_submodule(layer.name)
    quantized = QuantLinear.from_linear(linear, scheme, plan.input_scales.get(layer.name))
    for hooks in _CARRIED_HOOKS:
        # The very dictionary: a handle that removes its hook looks there.
        vars(quantized)[hooks] = vars(linear)[hooks]
    for name in layer.names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, quantized)
    error = _weight_error(linear_weight(linear).detach(), quantized)
    return LayerRecord(layer.name, layer.kind, scheme.name, "", layer.bytes, parameter_bytes(quantized), error)


_CARRIED_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
_LOST_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class WeightError:
    """``norm(dequantized - weight) / norm(weight)`` (Frobenius) of a weight ``[N, K]`` that comes a few rows at a time.

    It is summed in float64. Different pieces may give a different last digit: take ``rows_at_a_time``.
    """

    def __init__(self) -> None:
        """Nothing was added yet."""
        self._squares = torch.zeros(2, dtype=torch.float64)

    @staticmethod
    def rows_at_a_time(shape: Sequence[int]) -> int:
        """How many rows of a weight of ``shape`` make a piece."""
        # Three copies of a thirty-second in float64 take 3/8 of the memory of a bfloat16 weight.
        return max(shape[0] // 32, 2**16 // shape[1], 1)

    @torch.no_grad()
    def add(self, weight: Tensor, q: Tensor, scale: Tensor) -> None:
        """Takes in some rows: float ``[n, K]``, int8 ``[n, K]``, float32 ``[n]``."""
        wanted = weight.double()
        error = q.double().mul_(scale[:, None]).sub_(wanted)
        self._squares = self._squares.to(weight.device)
        self._squares += torch.stack((error.square_().sum(), wanted.square_().sum()))

    @property
    def value(self) -> float:
        """The error; 0 for a weight of zeros."""
        difference, norm = self._squares.sqrt().tolist()
        return difference / norm if norm else 0.0


def _weight_error(weight: Tensor, quantized: QuantLinear) -> float | None:
    if weight.device.type == "meta":
        return None
    error = WeightError()
    rows = error.rows_at_a_time(weight.shape)
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        error.add(weight[part], quantized.weight[part], quantized.weight_scale[part])
    return error.value


def _kept_record(layer: Layer) -> LayerRecord:
    return LayerRecord(layer.name, layer.kind, KEPT, layer.reason, layer.bytes, layer.bytes, None)


def _holds_pretrained(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")  # where it isn't imported, no model can be one of its own
    return transformers is not None and any(isinstance(m, transformers.PreTrainedModel) for m in model.modules())


def _check_not_quantized(model: nn.Module) -> None:
    count = sum(isinstance(module, QuantLinear) for module in model.modules())
    if count:
        raise ValueError(
            f"{type(model).__name__} is quantized already: {count} of its layers are QuantLinear. "
            "Start from the float model, and say in skip what is to stay in float"
        )


def _apply_skip(layers: list[Layer], skip: Pattern | Iterable[Pattern] | None) -> None:
    patterns = [] if skip is None else [skip] if isinstance(skip, str | re.Pattern) else list(skip)
    for pattern in patterns:
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(f"skip holds {pattern!r}; it takes names, globs and compiled regular expressions")
        matched = [layer for layer in layers if any(_matches(pattern, name) for name in layer.names)]
        if not matched:
            raise ValueError(_no_match(pattern, layers))
        for layer in matched:
            shown = pattern if isinstance(pattern, str) else pattern.pattern
            layer.reason = layer.reason or f"skip={shown!r}"


def _matches(pattern: Pattern, name: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    containers = _with_containers(name)
    if any(character in pattern for character in "*?["):
        return any(fnmatchcase(container, pattern) for container in containers)
    return pattern in containers


def _with_containers(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _no_match(pattern: Pattern, layers: list[Layer]) -> str:
    if isinstance(pattern, re.Pattern):
        return f"skip: the regular expression {pattern.pattern!r} is found in no linear layer's name"
    names = sorted({container for layer in layers for name in layer.names for container in _with_containers(name)})
    close = difflib.get_close_matches(pattern, names, n=3)
    hint = f": did you mean {' or '.join(map(repr, close))}?" if close else "; names are as in model.named_modules()"
    return f"skip: {pattern!r} matches no linear layer, nor a module that contains one{hint}"


def _nothing_to_swap(model: nn.Module, layers: list[Layer]) -> str:
    kind = type(model).__name__
    if not layers:
        return f"{kind} has no linear layer, so there is nothing to quantize"
    if layers[0].name == "":
        return f"{kind} is itself one layer, which can't be swapped in place: use QuantLinear.from_linear"
    reasons = Counter(layer.reason for layer in layers)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    return f"nothing to quantize: all {len(layers)} linear layers of {kind} stay in float ({listed})"


def _check_layers(model: nn.Module, layers: list[Layer]) -> None:
    offloaded, hooked, elsewhere = [], [], []
    for layer in layers:
        linear = model.get_submodule(layer.name)
        if hasattr(linear, "_hf_hook"):
            offloaded.append(layer.name)
        if any(vars(linear)[hooks] for hooks in _LOST_HOOKS):
            hooked.append(layer.name)
        if linear_weight(linear).device.type not in ("cpu", "cuda", "meta"):
            elsewhere.append(layer.name)
    if offloaded:
        raise ValueError(
            f"accelerate moves the weights of {_listed(offloaded)} as the model runs, which a swap would undo: "
            "quantize before the model is dispatched, or call accelerate.hooks.remove_hook_from_submodules(model) first"
        )
    if hooked:
        raise ValueError(f"state-dict hooks of {_listed(hooked)} would be lost: remove them, or skip these layers")
    if elsewhere:
        raise ValueError(f"{_listed(elsewhere)} must be on cuda or cpu, where qgemm runs: move the model there")


def _check_finite(model: nn.Module, layers: list[Layer]) -> None:
    bad = []
    for layer in layers:
        weight = linear_weight(model.get_submodule(layer.name)).detach()
        # Both carry NaN through, and neither needs memory.
        if weight.device.type != "meta" and not torch.stack(torch.aminmax(weight)).isfinite().all():
            bad.append(layer.name)
    if bad:
        raise ValueError(
            f"the weight of {_listed(bad)} holds NaN or Inf, which can't be quantized: mend the checkpoint, or pass "
            "these names in skip"
        )


def _check_input_scales(
    scheme: QuantScheme,
    chosen: list[Layer],
    layers: list[Layer],
    input_scales: Mapping[str, float | Tensor] | None,
) -> dict[str, float | Tensor]:
    if scheme.activation is None or scheme.activation.dynamic:
        if input_scales is not None:
            raise ValueError(f"scheme {scheme.name!r} finds scales as it runs: input_scales is for a static scheme")
        return {}
    given = dict(input_scales or {})
    known = {name for layer in layers for name in layer.names}
    if foreign := [name for name in given if name not in known]:
        raise ValueError(f"input_scales names {_listed(foreign)}, but the model has no such linear layer")
    scales = {layer.name: given[name] for layer in chosen for name in layer.names if name in given}
    if missing := [layer.name for layer in chosen if layer.name not in scales]:
        raise ValueError(f"scheme {scheme.name!r} needs input_scales for {_listed(missing)} too: add or skip them")
    for name, value in scales.items():
        scale = torch.as_tensor(value, dtype=torch.float32)
        if scale.numel() != 1 or (scale.device.type != "meta" and not (scale > 0 and scale.isfinite())):
            raise ValueError(f"input_scales[{name!r}] is {value}; it must be one finite number greater than 0")
    return scales


def _warn_of_experts(layers: list[Layer]) -> None:
    experts = sum(layer.bytes for layer in layers if layer.is_experts)
    total = sum(layer.bytes for layer in layers)
    if 2 * experts > total:
        warnings.warn(
            f"fused experts hold {experts / total:.0%} of this model's linear weights and stay in float: qgemm doesn't "
            "quantize them yet, so the model shrinks little",
            stacklevel=3,
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(map(repr, names[:_MANY])) + more
