"""``quantize_model``: swaps a model's linear layers and experts for ``QuantLinear`` and ``QuantExperts``, in place.

First every layer is inspected and everything is checked; only then are layers swapped, one at a time. So a wrong
argument leaves the model as it was. An interruption half-way does too, if memory has room for both the float model and
the quantized one (``model/restore.py``). Otherwise each float weight is freed before the next layer is touched: memory
peaks at the float model plus the working space of one layer, and a partly swapped model refuses to run. Between the
steps only names are kept, because a reference to a layer would keep its weight alive.

Only ``nn.Linear`` itself, transformers' ``Conv1D`` and ``FalconLinear``, and transformers' fused experts are swapped.
Other subclasses of ``nn.Linear`` have a meaning of their own, and ``swap_rules.py`` lists where even a plain one must
stay. The report gives the reason for each layer that stays in float.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from qgemm.arguments import check_model
from qgemm.calibration.budget import Budget, assign_schemes
from qgemm.calibration.collect import as_calls, find_scales
from qgemm.calibration.method import Method
from qgemm.calibration.observers import Observer
from qgemm.calibration.pipeline import quantize_blocks
from qgemm.calibration.quantization import Quantization, are_batches
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.result import Calibration
from qgemm.calibration.sensitivity import sensitivity as measure_sensitivity
from qgemm.calibration.sensitivity_result import Sensitivity
from qgemm.fusion import fuse as fuse_layers
from qgemm.model.announce import announce_quantized
from qgemm.model.plan import check_finite, plan_swaps
from qgemm.model.report import give_report
from qgemm.model.restore import restored_on_failure
from qgemm.model.selection import Patterns, SchemeChoice
from qgemm.model.swap import normal_tensors
from qgemm.nn.attention import opened_attention
from qgemm.nn.linear_layer import InputScale
from qgemm.scheme import QuantScheme

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
    resume_folder: str | Path | None = None,
    progress: bool | None = None,
    fuse: bool = False,
) -> Model:
    """Replaces the linear layers and experts of ``model`` by quantized ones, in place, and returns ``model``.

    Output heads, layers that share their weight, and layers whose weight other code reads stay in float;
    ``qgemm.report(model)`` lists every layer with what was done, or the reason.

    - ``scheme``: a scheme or its name; or a mapping from patterns to these, ``{"*.mlp.*": "int4", "*": "int8"}``, in
      which the first pattern that matches a layer counts. Layers whose scheme is None, or that no pattern matches, stay
      in float. With a ``budget`` it can be several schemes to choose from, but not a mapping.
    - ``skip``: patterns of layers to leave in float. A string is the dotted name of a layer, or of a module that
      contains layers; with ``*``, ``?`` or ``[`` in it, a glob over such names, in which ``*`` also matches dots. A
      regular expression, compiled or as text after ``re:``, may match any part of a layer's name.
    - ``include``: patterns of layers to quantize although they stay in float by default, such as output heads. Layers
      that can't be quantized, or that also match ``skip``, stay in float.
    - ``input_scales``: for a static scheme, the activation scale of every linear layer to be swapped, by name. Experts
      need none: they compute their scales at run time.
    - ``calibration``: instead of ``input_scales``, a ``qgemm.Calibration``, or batches to run the model on first:
      mappings of keyword arguments, tuples or lists of arguments, or tensors, on the model's device. The model runs in
      eval mode without gradients. Layers that it never calls stay in float, with a warning: usually other code reads
      their weight.
    - ``observer``: how scales are computed from batches, ``"min-max"`` if None: another name that ``qgemm.calibrate``
      accepts, or an ``Observer``.
    - ``recipe``: methods from ``qgemm.calibration``, applied in order, block by block: ``[SmoothQuant(), GPTQ()]``.
      ``calibration`` must then be batches, even under schemes that aren't static.
    - ``budget``: chooses one of the schemes, or float, for every layer, within a maximum size or loss; see
      ``qgemm.calibration.choose_schemes``. ``calibration`` must be batches.
    - ``sensitivity``: the result of ``qgemm.sensitivity``, for ``budget``; None measures it on the batches first, on
      the model's device.
    - ``device``: with batches, each block is moved to this device, quantized, and moved back.
    - ``resume_folder``: a folder in which finished blocks are stored, so that the same call continues after a kill.
      Remove it once the model is saved.
    - ``progress``: whether to show progress bars; None shows them on a terminal only.
    - ``fuse``: whether to fuse layers too, as ``qgemm.fuse`` does.

    A transformers model gets a copy of its config that marks it as quantized, for ``save_pretrained``. For a model on
    the meta device only the structure changes. Layers that accelerate offloads to the CPU stay there, in int8.

    Raises ``ValueError``, with the model unchanged, if there is nothing to swap, the model is already quantized, a
    pattern matches no layer, a weight holds NaN or Inf, ``input_scales``, ``calibration`` or ``budget`` doesn't fit the
    model, or a swap would lose something of a layer (state-dict hooks; weights that accelerate keeps on disk).

    Everything is checked before the first layer is swapped. Hooks, children, buffers and attributes of a layer move to
    the quantized one. If an exception (an interrupt, a bug) stops it half-way, the result depends on how much memory
    was free at the start:

    - With enough for the quantized layers in addition to the float model, the model is restored: the same modules with
      the same values. A recipe also needs room for a copy of the float model; with a recipe or batches, twice as much
      must be free.
    - Otherwise each float weight is freed before the next layer, so that memory peaks at the float model plus one
      layer. A partly swapped model then refuses to run or to be saved, and says so.
    """
    wanted = Quantization.of(
        scheme,
        skip=skip,
        include=include,
        input_scales=input_scales,
        recipe=recipe,
        observer=observer,
        budget=budget,
        device=device,
        resume_folder=resume_folder,
    )
    quantize(model, wanted, calibration=calibration, sensitivity=sensitivity, progress=progress)
    return fuse_layers(model) if fuse else model


def quantize(
    model: Model,
    wanted: Quantization,
    *,
    calibration: Calibration | Iterable[Any] | None = None,
    sensitivity: Sensitivity | None = None,
    progress: bool | None = None,
) -> Model:
    """Does what ``quantize_model`` does, as ``wanted`` says."""
    check_model(model)
    wanted.check_data(calibration, sensitivity)
    with normal_tensors(model), restored_on_failure(model) as way_back:
        with opened_attention(model):
            plan = plan_swaps(model, wanted.schemes, wanted.skip, wanted.include)
            schemes = wanted.options or plan.schemes_in_use
            wanted.check_schemes(schemes, calibration, sensitivity)
            by_blocks = wanted.goes_by_blocks(schemes, calibration)
            if by_blocks:
                wanted.check_runs(model)
            check_finite(model, plan.chosen)
            calls = as_calls(calibration) if by_blocks and are_batches(calibration) else []
            way_back.keep_if_room(plan.names, changes_values=bool(wanted.recipe), runs_model=are_batches(calibration))
            if wanted.budget is not None:
                if sensitivity is None:
                    sensitivity = measure_sensitivity(
                        model, calls, wanted.options, skip=wanted.skip, include=wanted.include, progress=progress
                    )
                chosen, notes = assign_schemes(plan.layers, wanted.options, wanted.budget, sensitivity)
                plan = replace(plan, schemes=chosen, notes=notes)
            elif not by_blocks:
                plan = find_scales(model, plan, wanted, calibration, progress)
            records = quantize_blocks(model, plan, wanted, calls, progress)
        give_report(model, plan, records, None if wanted.recipe is None else wanted.recipe.to_dict())
        announce_quantized(model)
    return model
