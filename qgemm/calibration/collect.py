"""``calibrate``: watches the inputs of a float model's layers as the model runs.

Hooks alone, no tracing: it works for whatever runs as plain PyTorch, and the model computes the same bits as without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qgemm.arguments import check_model
from qgemm.calibration.expert_work import routed_rows
from qgemm.calibration.hooks import hooked
from qgemm.calibration.method import Call
from qgemm.calibration.observers import Observer, resolve_observer
from qgemm.calibration.padding import Batch
from qgemm.calibration.result import Calibration
from qgemm.model.selection import Patterns, listed, select_layers
from qgemm.model.survey import find_layers
from qgemm.nn.attention import opened_attention
from qgemm.nn.float_experts import describe_experts
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
    model's outputs don't change. Padding, according to the ``attention_mask`` of a call of ``model``, doesn't count.
    Hooks are removed at the end, also after an error.

    - ``observer``: ``"min-max"``, ``"moving-average"``, ``"percentile"``, ``"mse"``, or an ``Observer`` with
      other settings.
    - ``skip``, ``include``: as for ``quantize_model``.

    Warns at the end of layers and experts that saw no tokens. Raises ``ValueError`` as ``quantize_model`` does, before
    the model runs; and in the model's call if a layer's input holds NaN or Inf.
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
    """The statistics of the layers called ``names`` on ``batches``, in eval mode and without gradients.

    A batch is a mapping of keyword arguments, a tuple or list of arguments, or a tensor, on the model's device. Padding
    doesn't count. The modules' training modes are restored. Warns of experts that saw no tokens. Raises
    ``TypeError`` for any other batch, ``ValueError`` if there is none.
    """
    check_batches(batches)
    experts = [layer.name for layer in find_layers(model) if layer.is_experts and not layer.reason]
    bar = tqdm(batches, desc="calibrate", unit="batch", disable=None if progress is None else not progress)
    with _watched(model, names, experts, observer) as calibration, in_eval_mode(model), torch.no_grad():
        for call in _each_call(bar):
            model(*call.args, **call.kwargs)
    return calibration


def check_batches(batches: Any) -> None:
    """Raises ``TypeError`` if ``batches`` is a single one, or nothing to iterate over."""
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"calibration is a {type(batches).__name__}; it takes a Calibration, or an iterable of batches: put a "
            "single batch into a list"
        )


def as_calls(batches: Iterable[Any], name: str = "calibration") -> list[Call]:
    """What all ``batches``, the argument of that name, have the model called with.

    Raises ``TypeError`` if one is none, ``ValueError`` if there are none.
    """
    check_batches(batches)
    return list(_each_call(batches, name))


def _each_call(batches: Iterable[Any], name: str = "calibration") -> Iterator[Call]:
    """As ``as_calls``, one by one as they come."""
    index = -1
    for index, batch in enumerate(batches):
        if isinstance(batch, Call):
            yield batch
        elif isinstance(batch, Mapping):
            yield Call(kwargs=batch)
        elif isinstance(batch, tuple | list):
            yield Call(tuple(batch))
        elif isinstance(batch, Tensor):
            yield Call((batch,))
        else:
            raise TypeError(
                f"batch {index} of calibration is a {type(batch).__name__}; a batch is a mapping of keyword arguments, "
                "a tuple or list of arguments, or a tensor"
            )
    if index < 0:
        raise ValueError(f"{name} has no batch: an iterator can be used only once")


@contextmanager
def _watched(model: nn.Module, names: list[str], experts: list[str], observer: str | Observer) -> Iterator[Calibration]:
    """Inside, calls of ``model`` add to the statistics of ``names``; at the end it warns of unused ``experts``."""
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


@contextmanager
def counted_experts(model: nn.Module, names: list[str], batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Inside, the tokens that go to each expert of the modules called ``names`` are counted: by name, int64 ``[E]``.

    ``batch``: which rows are tokens.
    """
    modules = {name: model.get_submodule(name) for name in names}
    sources = {name: describe_experts(module) for name, module in modules.items()}
    tokens = {name: torch.zeros(source.num_experts, dtype=torch.int64) for name, source in sources.items()}

    def count(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen, index = tokens[name], routed_rows(sources[name], name, batch, args, kwargs)[1].flatten()
        known = index[(index >= 0) & (index < len(seen))]
        seen.add_(torch.bincount(known, minlength=len(seen)).to(seen.device))

    with hooked(modules, count):
        yield tokens


def unused_experts(tokens: Mapping[str, Tensor]) -> list[str]:
    """The experts without tokens, as ``name[expert]``; a module's name alone if none of its experts has any."""
    unused = []
    for name, counts in tokens.items():
        without = (counts == 0).nonzero().flatten().tolist()
        unused += [name] if len(without) == len(counts) else [f"{name}[{expert}]" for expert in without]
    return unused


def warn_of_unused(experts: list[str]) -> None:
    """Warns of ``unused_experts``, if there are any."""
    if experts:
        warn_user(
            f"{listed(experts)} saw no tokens, so the calibration of the layers around them doesn't cover tokens that "
            "need them: use more batches, or more diverse ones"
        )


def warn_of_uncalled(names: list[str]) -> None:
    """Warns of layers that stay in float since calibration has never called them, if there are any."""
    if names:
        warn_user(
            f"{listed(names)} saw no tokens of calibration and stay in float: either other code reads its "
            "weight instead of calling it, or no batch reaches it: add batches that do"
        )


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, no module is in training mode; afterwards those are that were, or what is in their places."""
    training = [name for name, module in model.named_modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        modules = dict(model.named_modules())
        for name in training:
            if name in modules:
                modules[name].training = True
