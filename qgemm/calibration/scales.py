"""``find_scales``: the scales of layers' inputs that a plan still lacks, as they are given or found on data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from qgemm.calibration.collect import NEVER_CALLED, run_batches, warn_of_uncalled
from qgemm.calibration.quantization import Quantization
from qgemm.calibration.result import Calibration
from qgemm.model.plan import SwapPlan, with_scales
from qgemm.model.selection import listed
from qgemm.nn.linear_layer import InputScale, linear_weight


def find_scales(
    model: nn.Module,
    plan: SwapPlan,
    wanted: Quantization,
    calibration: Calibration | Iterable[Any] | None,
    progress: bool | None = None,
) -> SwapPlan:
    """``plan`` with the scales of its layers' inputs: those in ``wanted``, or of a calibration, or of batches for one.

    Layers that calibration never called get their ``reason`` to stay in float, with a warning. Raises ``ValueError``
    as ``quantize_model`` does.
    """
    if calibration is None:
        return with_scales(plan, wanted.input_scales)
    linears = [layer for layer in plan.chosen if plan.scheme_of(layer).is_static]
    if not isinstance(calibration, Calibration):
        names = [layer.name for layer in linears]
        calibration = run_batches(model, names, calibration, wanted.observer or "min-max", progress)
    unseen = [layer for layer in linears if layer.name not in calibration.statistics]
    uncalled = [layer.name for layer in unseen]
    if len(unseen) == len(linears):
        raise ValueError(
            f"calibration has no statistics of {listed(uncalled)}: run batches that reach them, or skip them"
        )
    for layer in unseen:
        layer.reason = NEVER_CALLED
    warn_of_uncalled(uncalled)
    scales: dict[str, InputScale] = {}
    for layer in linears:
        if layer.reason:
            continue
        seen = calibration.statistics[layer.name]
        columns = 0 if seen.channel_amax is None else len(seen.channel_amax)
        width = linear_weight(model.get_submodule(layer.name)).shape[1]
        if columns != width:
            raise ValueError(
                f"calibration saw {columns} input columns of {layer.name!r}, which has {width}: it is of another model"
            )
        scales[layer.name] = seen.input_scale(plan.scheme_of(layer))
    return with_scales(plan, scales)
