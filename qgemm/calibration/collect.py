"""``calibrate``: watches the inputs of a float model's layers as the model runs.

Hooks alone, no tracing: it works for whatever runs as plain PyTorch, and the model computes the same bits as without.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qgemm.calibration.observers import MinMax, Observer, resolve_observer
from qgemm.calibration.result import Calibration
from qgemm.selection import Pattern, listed, select_layers


@contextmanager
def calibrate(
    model: nn.Module,
    observer: str | Observer = "min-max",
    *,
    skip: Pattern | Iterable[Pattern] | None = None,
) -> Iterator[Calibration]:
    """A context in which every call of ``model`` adds to the statistics of its layers' inputs.

    The layers are those that ``quantize_model`` would swap, but for experts, which find their scales as they run. What
    the model computes stays the same. Hooks are removed at the end, also after an error.

    - ``observer``: ``"min-max"``, ``"moving-average"``, ``"percentile"``, ``"mse"``, or an ``Observer`` with the
      settings that are wanted.
    - ``skip``: as ``quantize_model`` has it.

    Warns at the end of layers that saw nothing. Raises ``ValueError`` as ``quantize_model`` does, before the model
    runs; and out of the model's call if a layer's input holds NaN or Inf.
    """
    names = [layer.name for layer in select_layers(model, skip) if not layer.reason and not layer.is_experts]
    with _watched(model, names, Calibration(resolve_observer(observer))) as calibration:
        yield calibration
    if unseen := [name for name in names if name not in calibration.statistics]:
        warnings.warn(
            f"{listed(unseen)} saw no tokens, so there are no scales for them: run batches that reach them, or pass "
            "them in skip to quantize_model",
            stacklevel=3,
        )


def run_batches(
    model: nn.Module, names: list[str], batches: Iterable[Any], progress: bool | None = None
) -> Calibration:
    """The ``"min-max"`` statistics of the layers called ``names`` on ``batches``, in eval mode and without gradients.

    A batch is a mapping of keyword arguments, a tuple or list of arguments, or a tensor, on the model's device. Modules
    are put back into the mode that they were in. Raises ``TypeError`` for any other batch, ``ValueError`` if there is
    none.
    """
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"calibration is a {type(batches).__name__}; it takes a Calibration, or an iterable of batches: put a "
            "single batch into a list"
        )
    bar = tqdm(batches, desc="calibrate", unit="batch", disable=None if progress is None else not progress)
    count = 0
    with _watched(model, names, Calibration(MinMax())) as calibration, _in_eval_mode(model), torch.no_grad():
        for batch in bar:
            _call(model, batch, count)
            count += 1
        if not count:
            raise ValueError("calibration has no batch: an iterator that was used up gives nothing a second time")
    return calibration


@contextmanager
def _watched(model: nn.Module, names: list[str], calibration: Calibration) -> Iterator[Calibration]:
    """Inside, every call of the layers called ``names`` adds to ``calibration``."""
    with ExitStack() as stack:
        for name in names:
            handle = model.get_submodule(name).register_forward_pre_hook(_hook(calibration, name), with_kwargs=True)
            stack.callback(handle.remove)
        yield calibration


def _hook(calibration: Calibration, name: str) -> Any:
    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        if x.device.type == "meta":
            raise ValueError(f"the input of {name!r} is on meta, without values: load the model to calibrate it")
        seen = calibration.statistics.get(name, calibration.observer)
        try:
            updated = seen.update(x)
        except ValueError as error:
            raise ValueError(f"the input of {name!r}: {error}") from error
        if updated.tokens:
            calibration.statistics[name] = updated

    return observe


def _call(model: nn.Module, batch: Any, index: int) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    elif isinstance(batch, Tensor):
        model(batch)
    else:
        raise TypeError(
            f"batch {index} of calibration is a {type(batch).__name__}; a batch is a mapping of keyword arguments, a "
            "tuple or list of arguments, or a tensor"
        )


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
