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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from qgemm.arguments import as_scales, check_model, shown
from qgemm.calibration.budget import Budget, assign_schemes
from qgemm.calibration.collect import as_calls
from qgemm.calibration.method import Call, Method
from qgemm.calibration.observers import Observer, resolve_observer
from qgemm.calibration.pipeline import quantize_blocks
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.result import Calibration
from qgemm.calibration.scales import calibrated_scales, wanting_data
from qgemm.calibration.sensitivity import sensitivity as measure_sensitivity
from qgemm.calibration.sensitivity_result import Sensitivity
from qgemm.device import find_device
from qgemm.model.announce import announce_quantized
from qgemm.model.plan import SwapPlan, check_finite, make_report, plan_swaps, warn_of_coverage, with_scales
from qgemm.model.report import LayerRecord
from qgemm.model.restore import restored_on_failure
from qgemm.model.selection import (
    Pattern,
    Patterns,
    SchemeChoice,
    as_patterns,
    resolve_schemes,
)
from qgemm.model.swap import make_unusable, swap
from qgemm.nn.attention import opened_attention
from qgemm.nn.linear_layer import InputScale
from qgemm.scheme import QuantScheme, resolve_scheme

Model = TypeVar("Model", bound=nn.Module)


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
            plan = plan_swaps(model, by_pattern, skip, include)
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
                    input_scales = calibrated_scales(model, plan, calibration, observer, progress)
                plan = with_scales(plan, input_scales)
                check_finite(model, plan.chosen)
                records = _swap_all(model, plan, progress)
        report = make_report(plan, records)
        if recipe is not None:
            report = replace(report, recipe=methods.to_dict())
        model._qgemm_report = report  # type: ignore[assignment]
        warn_of_coverage(plan.layers, stacklevel=3)
        announce_quantized(model)
    return model


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
    check_finite(model, plan.chosen)
    if calibration is None:
        return []
    return as_calls(calibration)


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


def _check_in_one_place(model: nn.Module) -> None:
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(homes) > 1 or any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            "device is given, but the model is spread over devices already: leave it out, or load on the CPU"
        )
