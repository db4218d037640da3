"""What a plan needs of data: whether there must be batches, and the scales of layers' inputs that are found on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from qgemm.calibration.collect import NEVER_CALLED, run_batches, warn_of_uncalled
from qgemm.calibration.method import Method
from qgemm.calibration.observers import Observer
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.result import Calibration
from qgemm.model.plan import SwapPlan, check_finite, plan_swaps
from qgemm.model.selection import Pattern, Patterns, listed
from qgemm.nn.linear_layer import InputScale, linear_weight
from qgemm.scheme import QuantScheme


def check_on_batches(
    model: nn.Module,
    schemes: Mapping[Pattern, QuantScheme | None],
    skip: Patterns,
    include: Patterns,
    recipe: Recipe | None,
    has_batches: bool,
) -> None:
    """Checks what can be before the model has weights; raises as ``quantize_model`` with a recipe or batches does."""
    in_use = plan_swaps(model, schemes, skip, include).schemes_in_use
    if not has_batches and (wanting := wanting_data(recipe or (), in_use)):
        raise ValueError(f"{wanting[0]} needs batches to run the model on: pass them as calibration")
    if recipe is None and not any(scheme.needs_data for scheme in in_use):
        raise ValueError(nothing_to_calibrate(in_use))


def wanting_data(recipe: Iterable[Method], schemes: Iterable[QuantScheme]) -> list[str]:
    """The methods and schemes, in words, that need data to run the model on."""
    wanting = [f"the method {method.name}" for method in recipe if method.needs_data]
    return wanting + [f"the scheme {scheme.name!r}" for scheme in schemes if scheme.needs_data]


def calibrated_scales(
    model: nn.Module,
    plan: SwapPlan,
    calibration: Calibration | Iterable[Any],
    observer: Observer,
    progress: bool | None = None,
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
        raise ValueError(nothing_to_calibrate(plan.schemes_in_use))
    if not isinstance(calibration, Calibration):
        check_finite(model, plan.chosen)  # or their NaN would be found in the input of the layer after
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


def nothing_to_calibrate(schemes: Sequence[QuantScheme]) -> str:
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
