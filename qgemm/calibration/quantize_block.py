"""``quantize_block``: applies methods to one block of a model, finds the scales of its inputs, and swaps its layers.

A method that fails on the block is undone, and a weight for which it found no finite scales is rounded to nearest; the
layers' records say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from qgemm.calibration.collect import NEVER_CALLED
from qgemm.calibration.expert_work import counted_experts, unused_experts
from qgemm.calibration.method import Block, ExpertsWork, LayerWork, Method
from qgemm.calibration.observers import Observer
from qgemm.calibration.outlier_columns import fill_columns
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.rounded_part import rounded_part
from qgemm.calibration.statistics import StatisticsSum
from qgemm.model.report import LayerRecord, kept_record
from qgemm.model.survey import Layer
from qgemm.model.swap import swap
from qgemm.nn.linear_layer import InputScale

# The error of a layer's output is computed on this many rows of its inputs.
_ROWS = 512


def quantize_block(
    block: Block,
    layers: Mapping[str, Layer],
    recipe: Recipe,
    observer: Observer,
    input_scales: Mapping[str, InputScale],
    can_go_back: bool,
) -> Iterator[LayerRecord]:
    """Quantizes the ``layers`` that ``block`` has work for, in order; yields each one's record once it is swapped.

    - ``observer``: of activations under static schemes; without calls, ``input_scales`` are used.
    - ``can_go_back``: whether to restore the float parameters if no layer could be swapped.
    """
    before = _float_parameters(block) if can_go_back and recipe else []
    try:
        fill_columns(block)  # before weights are quantized
        for method in recipe:
            _apply(method, block)
        fill_columns(block)
        samples: Mapping[str, Tensor] = {}
        if block.calls:
            input_scales, samples = _observe(block, observer)
        for layer in [layer for name, layer in layers.items() if name in block.layers or name in block.experts]:
            record = _swap_or_keep(block, layer, recipe, input_scales.get(layer.name), samples.get(layer.name))
            before = []
            yield record
    except BaseException:
        _put_back(before)
        raise


def _observe(block: Block, observer: Observer) -> tuple[dict[str, InputScale], dict[str, Tensor]]:
    """The scales of static layers' inputs, and a sample of all layers' inputs, from one run of the block.

    Sets ``block.unused`` to the experts that got no token.
    """
    seen = {name: observer for name, work in block.layers.items() if work.scheme.is_static}
    sums = {name: StatisticsSum(rows=_ROWS) for name in block.layers}

    def see(name: str, x: Tensor, tokens: Tensor) -> None:
        sums[name].add(tokens)
        if name in seen:
            seen[name] = seen[name].update(rounded_part(block.layers[name], tokens))

    with counted_experts(block.model, block.experts, block.batch) as tokens:
        for _ in block.watch(block.layers, see):
            pass
    block.unused = unused_experts(tokens)
    scales: dict[str, InputScale] = {
        name: each.input_scale(block.layers[name].scheme) for name, each in seen.items() if each.tokens
    }
    results = {name: total.result for name, total in sums.items()}
    return scales, {name: each.rows for name, each in results.items() if each is not None and each.rows is not None}


def _swap_or_keep(
    block: Block, layer: Layer, recipe: Recipe, input_scale: InputScale | None, sample: Tensor | None
) -> LayerRecord:
    # Popped, because another reference would keep a float weight alive.
    work = block.experts.pop(layer.name) if layer.is_experts else block.layers.pop(layer.name)
    is_called = sample is not None and (input_scale is not None or not work.scheme.is_static)
    if block.calls and not layer.is_experts and not is_called:
        layer.reason = NEVER_CALLED
        return kept_record(layer)
    if recipe and layer.is_experts and not work.decided:
        work.notes.append("experts are rounded to nearest")
    record = swap(block.model, layer, work.scheme, input_scale, **work.decisions)
    error = None
    if sample is not None:
        error = _output_error(work.module, block.model.get_submodule(layer.name), sample)
    return replace(record, note="; ".join(work.notes), output_error=error)


def _apply(method: Method, block: Block) -> None:
    """Applies a method; undoes it if it fails, or leaves values that aren't finite."""
    parameters = _float_parameters(block)
    works: list[LayerWork | ExpertsWork] = [*block.layers.values(), *block.experts.values()]
    before = [dict(vars(work)) for work in works]
    try:
        method.apply(block)
        failure = _not_finite(block)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        failure = str(error)
    if failure:
        _put_back(parameters)
        for work, values in zip(works, before, strict=True):
            vars(work).update(values)
            work.notes.append(f"{method.name} failed on its block: {failure}")
    for work in works:
        if not all(bool((weight.scale.isfinite() & (weight.scale > 0)).all()) for weight in work.decided):
            work.undecide(f"{method.name} found no finite scales: rounded to nearest")


_Saved: TypeAlias = "list[tuple[nn.Module, str, nn.Parameter | None, Tensor | None]]"


def _float_parameters(block: Block) -> _Saved:
    """The float parameters of a block's modules, including those that are None, and copies of their values."""
    return [
        (module, name, parameter, None if parameter is None else parameter.detach().clone())
        for module in block.module.modules()
        for name, parameter in module._parameters.items()
        if parameter is None or _is_float(parameter)
    ]


def _is_float(parameter: nn.Parameter) -> bool:
    """Whether methods may change it: 8-bit parameters belong to layers that are already quantized."""
    return parameter.is_floating_point() and parameter.itemsize > 1


def _put_back(saved: _Saved) -> None:
    for module, name, parameter, values in saved:
        if parameter is not None and values is not None:
            parameter.detach().copy_(values)
        setattr(module, name, parameter)


def _not_finite(block: Block) -> str:
    for name, parameter in block.module.named_parameters():
        if _is_float(parameter) and not bool(parameter.isfinite().all()):
            return f"{name} would hold NaN or Inf"
    return ""


def _output_error(linear: nn.Module, quantized: nn.Module, rows: Tensor) -> float | None:
    # Not by calling the module, because others' hooks shouldn't see these rows.
    wanted = linear.forward(rows).double()
    error = (quantized.forward(rows).double() - wanted).norm() / wanted.norm()
    return float(error) if bool(error.isfinite()) else None
