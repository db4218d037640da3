"""``calibrate``: observes the inputs of a float model's layers as it runs; ``find_scales``: the scales for a plan.

It only uses hooks, no tracing: it works for everything that runs as plain PyTorch, and the model computes the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qgemm.arguments import check_model
from qgemm.calibration.expert_work import counted_experts, unused_experts
from qgemm.calibration.hooks import hooked, in_eval_mode
from qgemm.calibration.method import Call
from qgemm.calibration.observers import Observer, resolve_observer
from qgemm.calibration.padding import Batch
from qgemm.calibration.quantization import Quantization
from qgemm.calibration.result import Calibration
from qgemm.model.plan import SwapPlan, with_scales
from qgemm.model.selection import Patterns, listed, select_layers
from qgemm.model.survey import find_layers
from qgemm.nn.attention import opened_attention
from qgemm.nn.linear_layer import linear_weight
from qgemm.warn import warn_user

NEVER_CALLED = "it was never called in calibration: other code may read its weight"


@contextmanager
def calibrate(
    model: nn.Module,
    observer: str | Observer = "min-max",
    *,
    skip: Patterns = None,
    include: Patterns = None,
) -> Iterator[Calibration]:
    """A context in which every call of ``model`` adds to the statistics of its layers' inputs.

    The layers are those that ``quantize_model`` would swap, except experts, which compute their scales at run time. The
    model's outputs don't change. Padding doesn't count, as far as the ``attention_mask`` of a call of ``model`` marks
    it. Hooks are removed at the end, also after an error.

    - ``observer``: ``"min-max"``, ``"moving-average"``, ``"percentile"``, ``"mse"``, or an ``Observer`` with
      other settings.
    - ``skip``, ``include``: as in ``quantize_model``.

    Warns at the end about layers and experts that saw no tokens. Raises ``ValueError`` as ``quantize_model`` does,
    before the model runs; and during a call of the model if a layer's input holds NaN or Inf.
    """
    check_model(model)
    with opened_attention(model):
        layers = [layer for layer in select_layers(model, skip, include) if not layer.reason]
        names = [layer.name for layer in layers if not layer.is_experts]
        with _watched(model, names, [layer.name for layer in layers if layer.is_experts], observer) as calibration:
            yield calibration
    if unseen := [name for name in names if name not in calibration.statistics]:
        warn_user(
            f"{listed(unseen)} saw no tokens, so there are no scales for them: run batches that reach them, or pass "
            "them in skip to quantize_model"
        )


def run_batches(
    model: nn.Module,
    names: list[str],
    batches: Iterable[Any],
    observer: str | Observer = "min-max",
    progress: bool | None = None,
) -> Calibration:
    """Collects the statistics of the layers ``names`` on ``batches``, in eval mode and without gradients.

    A batch is a mapping of keyword arguments, a tuple or list of arguments, or a tensor, on the model's device. Padding
    doesn't count. The modules' training modes are restored. Warns about experts that saw no tokens. Raises
    ``TypeError`` for any other batch, ``ValueError`` if there is no batch.
    """
    experts = [layer.name for layer in find_layers(model) if layer.is_experts and not layer.reason]
    return _run(model, names, experts, batches, observer, progress)


def find_scales(
    model: nn.Module,
    plan: SwapPlan,
    wanted: Quantization,
    calibration: Calibration | Iterable[Any] | None,
    progress: bool | None = None,
) -> SwapPlan:
    """``plan`` with its layers' input scales: from ``wanted``, from a calibration, or from batches.

    Layers that the model never called get that as their ``reason`` to stay in float, with a warning. Raises
    ``ValueError`` as ``quantize_model`` does.
    """
    scales = wanted.input_scales
    if calibration is not None:
        linears = [layer for layer in plan.chosen if plan.scheme_of(layer).is_static]
        if not isinstance(calibration, Calibration):
            names, experts = [each.name for each in linears], [each.name for each in plan.chosen if each.is_experts]
            calibration = _run(model, names, experts, calibration, wanted.observer or "min-max", progress)
        scales, uncalled = {}, []
        for layer in linears:
            seen = calibration.statistics.get(layer.name)
            if seen is None:
                uncalled.append(layer.name)
                layer.reason = NEVER_CALLED
                continue
            columns = 0 if seen.channel_amax is None else len(seen.channel_amax)
            width = linear_weight(model.get_submodule(layer.name)).shape[1]
            if columns != width:
                raise ValueError(
                    f"calibration saw {columns} input columns of {layer.name!r}, which has {width}: it is of another "
                    "model"
                )
            scales[layer.name] = seen.input_scale(plan.scheme_of(layer))
        if not scales:
            raise ValueError(
                f"calibration has no statistics of {listed(uncalled)}: run batches that reach them, or skip them"
            )
        warn_of_uncalled(uncalled)
    return with_scales(plan, scales)


def _run(
    model: nn.Module,
    names: list[str],
    experts: list[str],
    batches: Iterable[Any],
    observer: str | Observer,
    progress: bool | None,
) -> Calibration:
    """As ``run_batches``, for a model whose ``experts`` are known."""
    check_batches(batches)
    bar = tqdm(batches, desc="calibrate", unit="batch", disable=None if progress is None else not progress)
    with _watched(model, names, experts, observer) as calibration, in_eval_mode(model), torch.no_grad():
        for call in _each_call(bar):
            model(*call.args, **call.kwargs)
    return calibration


def check_batches(batches: Any) -> None:
    """Raises ``TypeError`` if ``batches`` is a single batch, or can't be iterated over."""
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"calibration is a {type(batches).__name__}; it takes a Calibration, or an iterable of batches: put a "
            "single batch into a list"
        )


def as_calls(batches: Iterable[Any], name: str = "calibration") -> list[Call]:
    """The model calls that ``batches``, the argument of that name, stand for.

    Raises ``TypeError`` if something isn't a batch, ``ValueError`` if there is none.
    """
    check_batches(batches)
    return list(_each_call(batches, name))


def _each_call(batches: Iterable[Any], name: str = "calibration") -> Iterator[Call]:
    """As ``as_calls``, one call at a time."""
    index = -1
    for index, batch in enumerate(batches):
        if reason := _why_no_tensors(batch):
            raise TypeError(
                f"batch {index} of calibration {reason}; it must be a tensor, such as a tokenizer returns with "
                'return_tensors="pt"'
            )
        if isinstance(batch, Call):
            yield batch
        elif isinstance(batch, Mapping):
            yield Call(kwargs=batch)
        elif isinstance(batch, tuple | list):
            yield Call(tuple(batch))
        elif isinstance(batch, Tensor):
            yield Call((batch,))
        else:
            way_out = ": make one of the text with the model's tokenizer" if isinstance(batch, str) else ""
            raise TypeError(
                f"batch {index} of calibration is a {type(batch).__name__}; a batch is a mapping of keyword arguments, "
                f"a tuple or list of arguments, or a tensor{way_out}"
            )
    if index < 0:
        raise ValueError(f"{name} has no batch: pass a list, since an iterator is empty after its first use")


def _why_no_tensors(batch: object) -> str:
    """What in ``batch`` should be a tensor but isn't: tokens, as they are before they become a tensor."""
    if isinstance(batch, Mapping) and not isinstance(ids := batch.get("input_ids"), Tensor | None):
        return f"has input_ids of type {type(ids).__name__}"
    if isinstance(batch, list) and batch and all(isinstance(each, int) for each in batch):
        return "is a list of numbers"
    return ""


@contextmanager
def _watched(model: nn.Module, names: list[str], experts: list[str], observer: str | Observer) -> Iterator[Calibration]:
    """Inside, calls of ``model`` add to the statistics of ``names``; at the end it warns about unused ``experts``."""
    calibration, batch = Calibration(resolve_observer(observer)), Batch()

    def observe(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(x, Tensor):
            raise TypeError(f"the input of {name!r} is a {type(x).__name__}; a layer's input must be a tensor")
        if x.device.type == "meta":
            raise ValueError(f"the input of {name!r} is on meta, without values: load the model to calibrate it")
        seen = calibration.statistics.get(name, calibration.observer)
        try:
            updated = seen.update(batch.tokens(x, name))
        except ValueError as error:
            raise ValueError(f"the input of {name!r}: {error}") from error
        if updated.tokens:
            calibration.statistics[name] = updated

    modules = {name: model.get_submodule(name) for name in names}
    with batch.watching(model), hooked(modules, observe), counted_experts(model, experts, batch) as tokens:
        yield calibration
    warn_of_unused(unused_experts(tokens))


def warn_of_unused(experts: list[str]) -> None:
    """Warns about unused ``experts``, if there are any."""
    if experts:
        warn_user(
            f"{listed(experts)} saw no tokens, so the calibration of the layers around them doesn't cover tokens that "
            "need them: use more batches, or more diverse ones"
        )


def warn_of_uncalled(names: list[str]) -> None:
    """Warns about layers that stay in float because the model never called them, if there are any."""
    if names:
        warn_user(
            f"{listed(names)} saw no tokens of calibration and stay in float: either other code reads its "
            "weight instead of calling it, or no batch reaches it: add batches that do"
        )
