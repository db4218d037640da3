"""``quantize_model``: swaps linear layers and experts of a model for ``QuantLinear`` and ``QuantExperts``, in place.

First every layer is looked at and everything is checked; only then is anything swapped, one layer at a time. So a
mistake leaves the model as it was. What stops the swaps half-way does too, if memory has room for the float model and
the quantized one (``model/restore.py``). Otherwise each float weight is freed before the next is touched, so that
memory peaks at the float model plus the working space of one layer, and a model that is swapped in part refuses to run.
Between the steps only names are kept: a reference to a layer would keep its weight alive.

Exactly ``nn.Linear``, transformers' ``Conv1D`` and ``FalconLinear``, and its modules of fused experts are swapped.
Other subclasses of ``nn.Linear`` mean something of their own, and ``swap_rules.py`` lists where even a plain one can't
go. Whatever stays in float is in the report with its reason.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qgemm.arguments import as_scales, check_model, shown
from qgemm.calibration.budget import Budget, assign_schemes
from qgemm.calibration.collect import (
    NEVER_CALLED,
    NO_BATCH,
    as_call,
    check_batches,
    run_batches,
    warn_of_uncalled,
)
from qgemm.calibration.method import Call, Method
from qgemm.calibration.observers import Observer, resolve_observer
from qgemm.calibration.pipeline import quantize_blocks
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.result import Calibration
from qgemm.calibration.sensitivity import sensitivity as measure_sensitivity
from qgemm.calibration.sensitivity_result import Sensitivity
from qgemm.device import find_device
from qgemm.model.announce import announce_quantized
from qgemm.model.offloading import check_hooks, weights_at_hand
from qgemm.model.report import KEPT, LayerRecord, QuantReport
from qgemm.model.restore import restored_on_failure
from qgemm.model.selection import (
    Pattern,
    Patterns,
    SchemeChoice,
    apply_schemes,
    as_patterns,
    listed,
    resolve_schemes,
    select_layers,
)
from qgemm.model.survey import Layer
from qgemm.model.swap import make_unusable, swap
from qgemm.nn.attention import opened_attention
from qgemm.nn.linear import linear_weight
from qgemm.nn.linear_layer import InputScale
from qgemm.numerics.zero_points import ZERO_POINTS, is_zero_point
from qgemm.scheme import QuantScheme, resolve_scheme

Model = TypeVar("Model", bound=nn.Module)

_SHOWN_CAUSES = 3


def quantize_model(
    model: Model,
    scheme: SchemeChoice | Sequence[str | QuantScheme] = "int8",
    *,
    skip: Patterns = None,
    include: Patterns = None,
    input_scales: Mapping[str, InputScale] | None = None,
    calibration: Calibration | Iterable[Any] | None = None,
    observer: str | Observer | None = None,
    recipe: Recipe | Sequence[Method] | None = None,
    budget: Budget | None = None,
    sensitivity: Sensitivity | None = None,
    device: torch.device | str | None = None,
    resume: str | Path | None = None,
    progress: bool | None = None,
) -> Model:
    """Swaps the linear layers and experts of ``model`` for quantized ones, in place, and returns ``model``.

    Output heads, layers that share their weight, and layers whose surroundings need a float weight stay as they are;
    ``qgemm.report(model)`` lists every layer with what was done or why not.

    - ``scheme``: a name from ``SCHEMES``, or a scheme; or a mapping of patterns to these, of which the first that
      matches a layer counts: ``{"*.mlp.*": "int4", "*": "int8"}``. Layers with None for a scheme stay in float, and so
      do those that no pattern matches. With a ``budget``, also several schemes to choose from, but no mapping.
    - ``skip``: patterns of layers to leave in float. A string is the dotted name of a layer, or of a module that
      contains layers; with ``*``, ``?`` or ``[`` in it, a glob over such names, in which ``*`` crosses dots. A regular
      expression, compiled or as text after ``re:``, is searched for in the names of layers.
    - ``include``: patterns of layers to quantize although they stay in float by default: output heads, and what a rule
      keeps. What can't be quantized stays, and so does what ``skip`` matches too.
    - ``input_scales``: for a static scheme, the activation's scale of every linear layer to be swapped, by name.
      Experts have none: under any scheme they are quantized with ``"int8"``.
    - ``calibration``: instead of ``input_scales``, what ``qgemm.calibrate`` gave, or batches to run the model on first:
      mappings of keyword arguments, tuples or lists of arguments, or tensors, on the model's device. It runs in eval
      mode without gradients. Layers that it never calls stay in float, with a warning: most often their weight is read
      by code around them.
    - ``observer``: what makes scales of batches, ``"min-max"`` if None: another name that ``qgemm.calibrate`` takes, or
      an ``Observer``.
    - ``recipe``: methods from ``qgemm.calibration``, applied in order, block by block: ``[SmoothQuant(), GPTQ()]``.
      ``calibration`` must be batches, then also under schemes that aren't static.
    - ``budget``: chooses for every layer one of the schemes, or float, within so many bytes or so much damage; see
      ``qgemm.calibration.choose_schemes``. ``calibration`` must be batches.
    - ``sensitivity``: what ``qgemm.sensitivity`` has measured, for ``budget``; None measures it on the batches first,
      where the model is.
    - ``device``: with batches, works block by block, each moved to this device and back; the model stays where it is.
    - ``resume``: a folder in which finished blocks are kept, so that the same call goes on where it was killed. Remove
      it when the model is saved.
    - ``progress``: whether to show progress bars; None shows them on a terminal only.

    A transformers model is told of it, so that ``save_pretrained`` works; it gets a copy of its config.
    A model on the meta device gets the structure alone. Raises ``ValueError``, with the model unchanged, if there is
    nothing to swap, the model is quantized already, a pattern matches no layer, a weight holds NaN or Inf,
    ``input_scales``, ``calibration`` or ``budget`` doesn't fit, or a layer carries what a swap would lose (state-dict
    hooks; weights that accelerate keeps on disk). What accelerate offloads to the CPU stays there, in int8.

    All that can be foreseen is checked before the first layer is swapped, and what a layer holds beside its weight
    (hooks, children, buffers, attributes) goes with it. If something unforeseen (an interrupt, a bug) stops it
    half-way, what is left depends on the memory that was free at its beginning:

    - With room for the quantized layers beside the float model, everything is put back: the same modules with the same
      values. A recipe needs room for a copy of the float model too; with one, or with batches, the room must be there
      twice.
    - Without it, each float weight is freed before the next is touched, so that memory peaks at the float model and one
      layer. A model that was swapped in part then refuses to run and to be saved, and says so.
    """
    check_model(model)
    input_scales = as_scales(input_scales)
    if budget is not None and not isinstance(budget, Budget):
        raise TypeError(f"budget is {shown(budget)}; it must be a qgemm.Budget")
    if sensitivity is not None and not isinstance(sensitivity, Sensitivity):
        raise TypeError(f"sensitivity is {shown(sensitivity)}; it must be what qgemm.sensitivity gave")
    place = None if device is None else find_device(device)
    if calibration is not None and input_scales is not None:
        raise ValueError("input_scales and calibration are both given, and each says what the scales are: pass one")
    if observer is not None and (calibration is None or isinstance(calibration, Calibration)):
        raise ValueError("observer is what makes scales of batches: pass those as calibration, or leave it out")
    observer = resolve_observer("min-max" if observer is None else observer)
    skip, include = as_patterns("skip", skip), as_patterns("include", include)
    by_pattern, options = _resolve(scheme, budget, sensitivity)
    with restored_on_failure(model) as way_back:
        with opened_attention(model):
            plan = _plan_without_scales(model, by_pattern, skip, include)
            schemes = options or plan.schemes_in_use
            by_blocks = recipe is not None or device is not None or resume is not None or budget is not None
            takes_batches = calibration is not None and not isinstance(calibration, Calibration)
            if by_blocks or (takes_batches and any(each.needs_blocks for each in schemes)):
                methods = recipe if isinstance(recipe, Recipe) else Recipe([] if recipe is None else recipe)
                wants_data = {"budget": budget is not None and sensitivity is None, "device": device is not None}
                wants_data |= {"resume": resume is not None}
                calls = _calls_for_blocks(model, plan, schemes, input_scales, calibration, methods, wants_data)
                if device is not None:
                    _check_in_one_place(model)
                way_back.keep_if_room(plan.names, changes_values=len(methods) > 0, runs_model=takes_batches)
                notes: dict[str, str] = {}
                if budget is not None:
                    if sensitivity is None:
                        sensitivity = measure_sensitivity(
                            model, calls, schemes, skip=skip, include=include, progress=progress
                        )
                    chosen, notes = assign_schemes(plan.layers, schemes, budget, sensitivity)
                    plan = replace(plan, schemes=chosen)
                layers = [(layer, plan.scheme_of(layer)) for layer in plan.chosen]
                records = quantize_blocks(
                    model, layers, methods, calls, observer, device=place, resume=resume, progress=progress
                )
                for name, note in notes.items():
                    if name in records:
                        records[name] = replace(records[name], note="; ".join(filter(None, (note, records[name].note))))
            else:
                way_back.keep_if_room(plan.names, changes_values=False, runs_model=takes_batches)
                if calibration is not None:
                    input_scales = _calibrated_scales(model, plan, calibration, observer, progress)
                plan = _with_scales(plan, input_scales)
                _check_finite(model, plan.chosen)
                records = _swap_all(model, plan, progress)
        report = make_report(plan, records)
        if recipe is not None:
            report = replace(report, recipe=methods.to_dict())
        model._qgemm_report = report  # type: ignore[assignment]
        warn_of_coverage(plan.layers, stacklevel=3)
        announce_quantized(model)
    return model


@dataclass(frozen=True)
class SwapPlan:
    """What is to become of every layer of a model.

    - ``schemes``: of the chosen layers, by name.
    - ``input_scales``: of those with a static scheme.
    """

    layers: list[Layer]
    schemes: dict[str, QuantScheme]
    input_scales: dict[str, InputScale] = field(default_factory=dict)

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
        """Each scheme that some layer has, once."""
        return list(dict.fromkeys(self.schemes.values()))

    def scheme_of(self, layer: Layer) -> QuantScheme:
        """How a chosen layer is to be quantized."""
        return self.schemes[layer.name]


def plan_swaps(
    model: nn.Module,
    scheme: SchemeChoice,
    skip: Patterns,
    include: Patterns,
    input_scales: Mapping[str, InputScale] | None,
    calibration: Calibration | None = None,
) -> SwapPlan:
    """Looks at every layer and checks everything but the weights' values; raises as ``quantize_model`` does."""
    plan = _plan_without_scales(model, resolve_schemes(scheme), skip, include)
    if calibration is not None:
        input_scales = _calibrated_scales(model, plan, calibration, calibration.observer, None)
    return _with_scales(plan, input_scales)


def check_on_batches(
    model: nn.Module,
    scheme: SchemeChoice,
    skip: Patterns,
    include: Patterns,
    recipe: Recipe | None,
    has_batches: bool,
) -> None:
    """Checks what can be before the model has weights; raises as ``quantize_model`` with a recipe or batches does."""
    schemes = _plan_without_scales(model, resolve_schemes(scheme), skip, include).schemes_in_use
    if not has_batches and (wanting := wanting_data(recipe or (), schemes)):
        raise ValueError(f"{wanting[0]} needs batches to run the model on: pass them as calibration")
    if recipe is None and not any(scheme.needs_data for scheme in schemes):
        raise ValueError(_nothing_to_calibrate(schemes))


def wanting_data(recipe: Iterable[Method], schemes: Iterable[QuantScheme]) -> list[str]:
    """The methods and schemes, in words, that need data to run the model on."""
    wanting = [f"the method {method.name}" for method in recipe if method.needs_data]
    return wanting + [f"the scheme {scheme.name!r}" for scheme in schemes if scheme.needs_data]


def _plan_without_scales(
    model: nn.Module, schemes: Mapping[Pattern, QuantScheme | None], skip: Patterns, include: Patterns
) -> SwapPlan:
    layers = select_layers(model, skip, include)
    plan = SwapPlan(layers, apply_schemes(model, layers, schemes))
    _check_layers(model, plan.chosen)
    return plan


def _swap_all(model: nn.Module, plan: SwapPlan, progress: bool | None) -> dict[str, LayerRecord]:
    records = {}
    show = None if progress is None else not progress
    try:
        for layer in tqdm(plan.chosen, desc="quantize", unit="layer", disable=show):
            records[layer.name] = swap(model, layer, plan.scheme_of(layer), plan.input_scales.get(layer.name))
    except BaseException as error:
        if records:
            make_unusable(model, error)
        raise
    return records


def _with_scales(plan: SwapPlan, input_scales: Mapping[str, InputScale] | None) -> SwapPlan:
    for scheme in plan.schemes_in_use:
        if scheme.outlier_columns:
            raise ValueError(
                f"scheme {scheme.name!r} keeps columns in float that are found in calibration: load the float model, "
                "and pass it to quantize_model with batches as calibration"
            )
    return replace(plan, input_scales=_check_input_scales(plan, input_scales))


def _calls_for_blocks(
    model: nn.Module,
    plan: SwapPlan,
    schemes: Sequence[QuantScheme],
    input_scales: Mapping[str, InputScale] | None,
    calibration: Calibration | Iterable[Any] | None,
    recipe: Recipe,
    wants_data: Mapping[str, bool],
) -> list[Call]:
    """The calibration data to quantize block by block; checks all that can be before it begins.

    ``wants_data``: which arguments of ``quantize_model`` need the data.
    """
    if input_scales is not None:
        raise ValueError("input_scales are given, but a recipe finds scales by itself: pass batches as calibration")
    if isinstance(calibration, Calibration):
        raise ValueError("calibration is what was seen before, but blocks run on the data itself: pass the batches")
    if calibration is None:
        wanting = wanting_data(recipe, schemes)
        wanting += [name for name, wants in wants_data.items() if wants]
        if wanting:
            raise ValueError(f"{wanting[0]} needs batches to run the model on: pass them as calibration")
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ValueError("a recipe needs weights, but the model has some on meta: load it, not offloaded by accelerate")
    _check_finite(model, plan.chosen)
    if calibration is None:
        return []
    check_batches(calibration)
    calls = [as_call(batch, index) for index, batch in enumerate(calibration)]
    if not calls:
        raise ValueError(NO_BATCH)
    return calls


def _resolve(
    scheme: SchemeChoice | Sequence[str | QuantScheme], budget: Budget | None, sensitivity: Sensitivity | None
) -> tuple[dict[Pattern, QuantScheme | None], list[QuantScheme]]:
    """The schemes by pattern; and those that a budget may choose from, none without a budget."""
    if budget is None and sensitivity is not None:
        raise ValueError("sensitivity is given without a budget to choose schemes within: pass budget=Budget(...)")
    if isinstance(scheme, Sequence) and not isinstance(scheme, str):
        if budget is None:
            raise ValueError(f"scheme is {scheme!r}: pass one, or a budget to choose within")
        if not scheme:
            raise ValueError("scheme is empty: name those that the budget may choose from")
        options = [resolve_scheme(each) for each in scheme]
        return {"*": options[0]}, options
    if budget is None:
        return resolve_schemes(scheme), []
    if isinstance(scheme, Mapping):
        raise ValueError(
            "scheme says what each layer is to have, and so does a budget: pass a list of schemes for the budget to "
            "choose from, or leave budget out"
        )
    only = resolve_scheme(scheme)
    return {"*": only}, [only]


def make_report(plan: SwapPlan, records: Mapping[str, LayerRecord]) -> QuantReport:
    """The report of a model, from the records of the layers that were swapped."""
    return QuantReport(tuple(records.get(layer.name) or _kept_record(layer) for layer in plan.layers))


_LOST_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _kept_record(layer: Layer) -> LayerRecord:
    return LayerRecord(layer.name, layer.kind, KEPT, layer.reason, layer.bytes, layer.bytes, None)


def _check_layers(model: nn.Module, layers: list[Layer]) -> None:
    hooked, elsewhere = [], []
    for layer in layers:
        module = model.get_submodule(layer.name)
        if any(vars(module)[hooks] for hooks in _LOST_HOOKS):
            hooked.append(layer.name)
        if any(weight.device.type not in ("cpu", "cuda", "meta") for weight in _weights(module)):
            elsewhere.append(layer.name)
    check_hooks(model, [layer.name for layer in layers])
    if hooked:
        raise ValueError(f"state-dict hooks of {listed(hooked)} would be lost: remove them, or skip these layers")
    if elsewhere:
        raise ValueError(f"{listed(elsewhere)} must be on cuda or cpu, where qgemm runs: move the model there")


def _check_in_one_place(model: nn.Module) -> None:
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(homes) > 1 or any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            "device is given, but the model is spread over devices already: leave it out, or load on the CPU"
        )


def _check_finite(model: nn.Module, layers: list[Layer]) -> None:
    bad = []
    for layer in layers:
        module = model.get_submodule(layer.name)
        with weights_at_hand(module):
            # Both carry NaN through, and neither needs memory.
            weights = [weight for weight in _weights(module) if weight.device.type != "meta"]
            if not all(torch.stack(torch.aminmax(weight)).isfinite().all() for weight in weights):
                bad.append(layer.name)
    if bad:
        raise ValueError(
            f"the weight of {listed(bad)} holds NaN or Inf, which can't be quantized: mend the checkpoint, or pass "
            "these names in skip"
        )


def _weights(module: nn.Module) -> list[Tensor]:
    """The weights of a layer that is to be swapped: what it holds but for biases."""
    return [
        parameter.detach() for name, parameter in module.named_parameters(recurse=False) if not name.endswith("bias")
    ]


def _calibrated_scales(
    model: nn.Module,
    plan: SwapPlan,
    calibration: Calibration | Iterable[Any],
    observer: Observer,
    progress: bool | None,
) -> dict[str, InputScale]:
    """``input_scales`` of a calibration, or of the batches for one."""
    for scheme in plan.schemes_in_use:
        if scheme.needs_blocks:
            raise ValueError(
                f"scheme {scheme.name!r} rotates activations, or keeps columns of them in float, which calibration "
                "hasn't seen: pass batches"
            )
    linears = [layer for layer in plan.chosen if plan.scheme_of(layer).is_static]
    if not linears:
        raise ValueError(_nothing_to_calibrate(plan.schemes_in_use))
    if not isinstance(calibration, Calibration):
        _check_finite(model, plan.chosen)  # or their NaN would be found in the input of the layer after
        calibration = run_batches(model, [layer.name for layer in linears], calibration, observer, progress)
    if unseen := [layer for layer in linears if layer.name not in calibration.statistics]:
        uncalled = [layer.name for layer in unseen]
        if len(unseen) == len(linears):
            raise ValueError(f"calibration has nothing of {listed(uncalled)}: run batches that reach them, or skip")
        for layer in unseen:
            layer.reason = NEVER_CALLED
        linears = [layer for layer in linears if not layer.reason]
        warn_of_uncalled(uncalled, stacklevel=4)  # of quantize_model
    scales: dict[str, InputScale] = {}
    for layer in linears:
        seen = calibration.statistics[layer.name]
        width = linear_weight(model.get_submodule(layer.name)).shape[1]
        if seen.channel_amax is None or len(seen.channel_amax) != width:
            columns = 0 if seen.channel_amax is None else len(seen.channel_amax)
            raise ValueError(
                f"calibration saw {columns} input columns of {layer.name!r}, which has {width}: it is of another model"
            )
        scales[layer.name] = seen.input_scale(plan.scheme_of(layer))
    return scales


def _nothing_to_calibrate(schemes: Sequence[QuantScheme]) -> str:
    """Why batches by themselves are of no use, and what would use them."""
    names = " and ".join(repr(scheme.name) for scheme in schemes)
    if all(scheme.is_weight_only for scheme in schemes):
        return (
            f"scheme {names} multiplies in float, so calibration by itself finds nothing: with a recipe, such as "
            "recipe=[GPTQ()], the batches decide better weights than rounding gives"
        )
    return (
        f"scheme {names} finds scales as it runs: calibration is for a static scheme, or for a recipe, such as "
        "recipe=[SmoothQuant(), GPTQ()]"
    )


def _check_input_scales(plan: SwapPlan, input_scales: Mapping[str, InputScale] | None) -> dict[str, InputScale]:
    static = {layer.name: plan.scheme_of(layer) for layer in plan.chosen if plan.scheme_of(layer).is_static}
    if not static:
        if input_scales is not None:
            names = " and ".join(repr(scheme.name) for scheme in plan.schemes_in_use)
            raise ValueError(f"scheme {names} finds scales as it runs: input_scales is for a static scheme")
        return {}
    given = input_scales or {}
    known = {name for layer in plan.layers if not layer.is_experts for name in layer.names}
    if foreign := [name for name in given if name not in known]:
        raise ValueError(f"input_scales names {listed(foreign)}, but the model has no such linear layer")
    scales = {layer.name: given[name] for layer in plan.chosen for name in layer.names if name in given}
    if missing := [name for name in static if name not in scales]:
        name = static[missing[0]].name
        if given:
            raise ValueError(f"scheme {name!r} needs input_scales for {listed(missing)} too: add or skip them")
        raise ValueError(
            f"scheme {name!r} needs a scale for the input of {listed(missing)}: pass calibration=batches, which finds "
            "them, or input_scales, or choose a scheme that finds them as it runs"
        )
    scales = {name: value for name, value in scales.items() if name in static}
    for name, value in scales.items():
        _check_input_scale(name, value, static[name])
    return scales


def _check_input_scale(name: str, value: InputScale, scheme: QuantScheme) -> None:
    if isinstance(value, tuple | list) != scheme.has_zero_point or (
        isinstance(value, tuple | list) and len(value) != 2
    ):
        wanted = "a pair, of a scale and a zero point" if scheme.has_zero_point else "one number"
        raise ValueError(f"input_scales[{name!r}] is {value}; scheme {scheme.name!r} takes {wanted}")
    number, zero_point = value if isinstance(value, tuple | list) else (value, 0)
    if not all(isinstance(each, int | float | Tensor) for each in (number, zero_point)):
        raise TypeError(f"input_scales[{name!r}] is {shown(value)}; it takes numbers")
    scale, zero = (torch.as_tensor(each, dtype=torch.float32) for each in (number, zero_point))
    if scale.numel() != 1 or (scale.device.type != "meta" and not (scale > 0 and scale.isfinite())):
        raise ValueError(f"input_scales[{name!r}] is {value}; it must be one finite number greater than 0")
    if zero.numel() != 1 or (zero.device.type != "meta" and not is_zero_point(float(zero))):
        raise ValueError(f"input_scales[{name!r}] is {value}; its zero point must be {ZERO_POINTS}")


def warn_of_coverage(layers: list[Layer], stacklevel: int) -> None:
    """Warns if less than half of the bytes in products is quantized, what users wanted in float aside.

    ``layers``: after their reasons are known.
    """
    counted = [layer for layer in layers if not layer.is_wish]
    kept = [layer for layer in counted if layer.reason]
    total, left = sum(layer.bytes for layer in counted), sum(layer.bytes for layer in kept)
    if 2 * left <= total:
        return
    sizes: Counter[str] = Counter()
    for layer in kept:
        sizes[layer.reason] += layer.bytes
    causes = "; ".join(
        f"{count / total:.0%}: {reason} ({listed([layer.name for layer in kept if layer.reason == reason], 2)})"
        for reason, count in sizes.most_common(_SHOWN_CAUSES)
        if count
    )
    by_default = sorted((layer for layer in kept if layer.bytes and not layer.obstacle), key=lambda layer: -layer.bytes)
    gain = sum(layer.bytes for layer in by_default) / total
    names = listed([layer.name for layer in by_default], 2)
    way_out = f"include=[...] quantizes {gain:.0%} more, of {names}" if by_default else "That can't be quantized"
    warnings.warn(
        f"only {1 - left / total:.0%} of the bytes that this model multiplies by are quantized, so it shrinks little. "
        f"What stays in float: {causes}. {way_out}",
        stacklevel=stacklevel,
    )
