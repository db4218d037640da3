"""``SwapPlan``: what will become of each layer of a model, decided and checked before any layer is swapped.

Plans only hold names, because a reference to a layer would keep its weight alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from qgemm.model.offloading import check_hooks, weights_at_hand
from qgemm.model.selection import Pattern, Patterns, apply_schemes, listed, select_layers
from qgemm.model.survey import Layer
from qgemm.nn.attention import STATE_DICT_HOOKS
from qgemm.nn.linear_layer import InputScale, parse_input_scale
from qgemm.scheme import QuantScheme
from qgemm.tables import size, text_table


@dataclass(frozen=True)
class SwapPlan:
    """What will become of each layer of a model. ``print`` shows a table.

    - ``schemes``: those of the chosen layers, by name.
    - ``input_scales``: those of layers with a static scheme.
    - ``notes``: explanations why a layer has its scheme.
    """

    layers: list[Layer]
    schemes: dict[str, QuantScheme]
    input_scales: dict[str, InputScale] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def chosen(self) -> list[Layer]:
        """The layers to be swapped."""
        return [layer for layer in self.layers if not layer.reason]

    @property
    def names(self) -> list[str]:
        """The names of the layers to be swapped."""
        return [layer.name for layer in self.chosen]

    @property
    def schemes_in_use(self) -> list[QuantScheme]:
        """Each scheme that a layer uses, once."""
        return list(dict.fromkeys(self.schemes.values()))

    def scheme_of(self, layer: Layer) -> QuantScheme:
        """The scheme of a chosen layer."""
        return self.schemes[layer.name]

    def __str__(self) -> str:
        """An aligned table with a row per layer and totals at the end."""
        rows = []
        for layer in self.layers:
            choice = f"float: {layer.reason}" if layer.reason else self.scheme_of(layer).name
            rows.append((layer.name, layer.kind, choice, size(layer.bytes), self.notes.get(layer.name, "")))
        chosen, total = (sum(layer.bytes for layer in layers) for layers in (self.chosen, self.layers))
        below = f"{len(self.chosen)} of {len(self.layers)} layers to quantize, {size(chosen)} of {size(total)}"
        return text_table(("layer", "kind", "scheme", "bytes", "note"), rows, {"bytes"}, [below])


def plan_swaps(
    model: nn.Module, schemes: Mapping[Pattern, QuantScheme | None], skip: Patterns, include: Patterns
) -> SwapPlan:
    """Examines every layer of ``model`` and decides; raises as ``quantize_model`` does.

    It doesn't check the weights' values, nor the scales of inputs, which ``with_scales`` adds.
    """
    layers = select_layers(model, skip, include)
    plan = SwapPlan(layers, apply_schemes(model, layers, schemes))
    hooked, elsewhere = [], []
    for name in plan.names:
        module = model.get_submodule(name)
        if any(vars(module)[hooks] for hooks in STATE_DICT_HOOKS):
            hooked.append(name)
        if any(weight.device.type not in ("cpu", "cuda", "meta") for weight in _weights(module)):
            elsewhere.append(name)
    check_hooks(model, plan.names)
    if hooked:
        raise ValueError(f"state-dict hooks of {listed(hooked)} would be lost: remove them, or skip these layers")
    if elsewhere:
        raise ValueError(f"{listed(elsewhere)} must be on cuda or cpu, where qgemm runs: move the model there")
    return plan


def with_scales(plan: SwapPlan, input_scales: Mapping[str, InputScale] | None) -> SwapPlan:
    """Returns ``plan`` with the scales of its layers' inputs, checked; raises as ``quantize_model`` does."""
    for scheme in plan.schemes_in_use:
        if scheme.outlier_columns:
            raise ValueError(
                f"scheme {scheme.name!r} keeps columns in float that are found in calibration: load the float model, "
                "and pass it to quantize_model with batches as calibration"
            )
    return replace(plan, input_scales=_check_input_scales(plan, input_scales))


def _check_input_scales(plan: SwapPlan, input_scales: Mapping[str, InputScale] | None) -> dict[str, InputScale]:
    static = {layer.name: plan.scheme_of(layer) for layer in plan.chosen if plan.scheme_of(layer).is_static}
    if not static:
        if input_scales is not None:
            names = " and ".join(repr(scheme.name) for scheme in plan.schemes_in_use)
            raise ValueError(f"scheme {names} computes its scales at run time: input_scales is for static schemes")
        return {}
    given = input_scales or {}
    known = {name for layer in plan.layers if not layer.is_experts for name in layer.names}
    if foreign := [name for name in given if name not in known]:
        raise ValueError(
            f"input_scales names {listed(foreign)}, but the model has no such linear layer; "
            "names are as in model.named_modules()"
        )
    scales = {layer.name: given[name] for layer in plan.chosen for name in layer.names if name in given}
    if missing := [name for name in static if name not in scales]:
        name = static[missing[0]].name
        if given:
            raise ValueError(f"scheme {name!r} needs input_scales for {listed(missing)} too: add or skip them")
        raise ValueError(
            f"scheme {name!r} needs a scale for the input of {listed(missing)}: pass calibration=batches, which finds "
            "them, or input_scales, or choose a scheme that computes them at run time"
        )
    scales = {name: value for name, value in scales.items() if name in static}
    for name, value in scales.items():
        parse_input_scale(value, static[name], name=f"input_scales[{name!r}]")
    return scales


def check_finite(model: nn.Module, layers: list[Layer]) -> None:
    """Raises ``ValueError`` if a weight of ``layers`` holds NaN or Inf."""
    bad = []
    for layer in layers:
        module = model.get_submodule(layer.name)
        with weights_at_hand(module):
            # Both propagate NaN, and neither needs extra memory.
            weights = [weight for weight in _weights(module) if weight.device.type != "meta"]
            if not all(torch.stack(torch.aminmax(weight)).isfinite().all() for weight in weights):
                bad.append(layer.name)
    if bad:
        raise ValueError(
            f"the weight of {listed(bad)} holds NaN or Inf, which can't be quantized: repair the checkpoint, or pass "
            "these names in skip"
        )


def _weights(module: nn.Module) -> list[Tensor]:
    """The weights of a layer that will be swapped: its parameters except biases."""
    return [
        parameter.detach() for name, parameter in module.named_parameters(recurse=False) if not name.endswith("bias")
    ]
