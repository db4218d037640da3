"""``Calibration``: the statistics of a model's layers, by name.

They are stored in one safetensors file: for a layer ``x``, the tensors ``x.tokens``, ``x.channel_min``,
``x.channel_max`` and whatever else its observer keeps. The header's metadata contains the observer's name and settings,
as JSON under ``qgemm_calibration``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.arguments import as_path, shown
from qgemm.calibration.histogram import BINS
from qgemm.calibration.observers import Observer, parse_observer
from qgemm.checkpoint.disk import make_folder, replacing
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import StoredTensor, read_header, read_metadata, read_values
from qgemm.checkpoint.safetensors_writer import write_safetensors
from qgemm.scheme import QuantScheme, resolve_scheme

METADATA = "qgemm_calibration"

# The dtype and the number of dimensions of the tensors that observers keep.
_STORED = {
    "tokens": (torch.int64, 0),
    "channel_min": (torch.float32, 1),
    "channel_max": (torch.float32, 1),
    "average": (torch.float64, 0),
    "batches": (torch.int64, 0),
    "counts": (torch.int64, 1),
}
# The minimum of their values, where that isn't 0.
_MINIMA: dict[str, float] = {"tokens": 1, "batches": 1, "channel_min": -math.inf, "channel_max": -math.inf}
# Per bin, so that the sum over all bins fits into int64.
_MAX_COUNT = 1 << 50


@dataclass(frozen=True)
class Calibration:
    """The statistics that ``calibrate`` collected.

    - ``observer``: the initial state of every layer's statistics.
    - ``statistics``: an observer for each layer that was called, by the layer's name.
    """

    observer: Observer
    statistics: dict[str, Observer] = field(default_factory=dict)

    def input_scales(self, scheme: str | QuantScheme) -> dict[str, float | tuple[float, int]]:
        """The scale of each layer's input under a static ``scheme``, with its zero point if it has one; for JSON.

        ``calibration=`` doesn't need it: that gives each layer the scale for its own scheme. Raises ``ValueError`` for
        a scheme that isn't static, or that quantizes something other than the layer's plain input.
        """
        found = resolve_scheme(scheme)
        check_has_statistics([found])
        if not found.is_static:
            raise ValueError(
                f"scheme {found.name!r} finds scales as it runs, so it takes none: name a static scheme, such as "
                "'int8-static'"
            )
        return {name: observer.input_scale(found) for name, observer in self.statistics.items()}

    def merge(self, other: Calibration) -> Calibration:
        """The combined statistics, for example of two processes. Raises ``ValueError`` if they are incompatible."""
        if not isinstance(other, Calibration):
            raise TypeError(f"other is {shown(other)}; it must be a Calibration")
        self.observer.merge(other.observer)
        merged = dict(self.statistics)
        for name, observer in other.statistics.items():
            try:
                merged[name] = merged.get(name, self.observer).merge(observer)
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from error
        return Calibration(self.observer, merged)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes the statistics to a safetensors file, atomically: an old file stays until the new one is complete.

        Raises ``FileExistsError`` if the file exists, unless ``overwrite`` is set.
        """
        path = as_path("path", path)
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} already exists; pass overwrite=True to replace it")
        make_folder(path.parent)
        tensors = {
            f"{name}.{key}": torch.as_tensor(getattr(observer, key), dtype=_STORED[key][0], device="cpu")
            for name, observer in self.statistics.items()
            for key in _kept_by(observer)
        }
        about = {"observer": self.observer.name, "settings": self.observer.settings}
        with replacing(path) as file:
            write_safetensors(file, tensors, lambda written: None, {METADATA: json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads the statistics that ``save`` wrote. Raises ``CheckpointError`` for a damaged or different file."""
        path = as_path("path", path)
        observer = _parse_observer(path, read_metadata(path).get(METADATA))
        kept = _kept_by(observer)
        stored = read_header(path)
        layers = _layer_names(path, stored, kept)
        values = dict(read_values(stored, torch.device("cpu")))
        statistics = {}
        for layer in layers:
            state: dict[str, Any] = {}
            for key in kept:
                value = values[f"{layer}.{key}"]
                _check_value(path, f"{layer}.{key}", value, _MINIMA.get(key, 0))
                state[key] = value if value.ndim else value.item()
            low, high = state["channel_min"], state["channel_max"]
            if low.shape != high.shape or bool((low > high).any()):
                raise CheckpointError(f"{path}: {layer}.channel_min must be as long as {layer}.channel_max, and below")
            statistics[layer] = replace(observer, **state)
        return cls(observer, statistics)


def check_has_statistics(schemes: Iterable[QuantScheme]) -> None:
    """Raises ``ValueError`` if a scheme needs more than a ``Calibration`` has: statistics of unchanged inputs."""
    for scheme in schemes:
        if scheme.needs_blocks:
            raise ValueError(
                f"scheme {scheme.name!r} rotates activations, or keeps columns of them in float, which a Calibration "
                "has no statistics of: pass batches as calibration to quantize_model or QGemmConfig"
            )


def _kept_by(observer: Observer) -> list[str]:
    return [each.name for each in fields(observer) if each.kw_only]


def _parse_observer(path: Path, text: str | None) -> Observer:
    if text is None:
        raise CheckpointError(f"{path} holds no statistics: give a file that Calibration.save wrote")
    try:
        about = json.loads(text)
        return parse_observer(about["observer"], about["settings"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {METADATA} doesn't name an observer of qgemm: {error!r}") from error


def _layer_names(path: Path, stored: dict[str, StoredTensor], kept: Iterable[str]) -> list[str]:
    """The layers that a file has statistics of, in order; checks that each has all of them, and their kinds."""
    layers = sorted({name.rpartition(".")[0] for name in stored})
    wanted = {f"{layer}.{key}": _STORED[key] for layer in layers for key in kept}
    if odd := sorted(wanted.keys() ^ stored.keys()):
        raise CheckpointError(f"{path}: {odd[0]} is {'missing' if odd[0] in wanted else 'no statistic'}")
    for name, (dtype, dimensions) in wanted.items():
        tensor = stored[name]
        is_counts = name.endswith(".counts")
        if tensor.dtype != dtype or len(tensor.shape) != dimensions or (is_counts and tensor.shape != (BINS,)):
            size = f"[{BINS}]" if is_counts else f"with {dimensions} dimensions"
            raise CheckpointError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}; it must be {dtype} {size}")
    return layers


def _check_value(path: Path, name: str, value: Tensor, least: float) -> None:
    if not value.numel() or not bool((value.isfinite() & (value >= least)).all()):
        wanted = "finite numbers" if least == -math.inf else f"finite numbers, {least} or more"
        raise CheckpointError(f"{path}: {name} must be {wanted}")
    if not value.is_floating_point() and int(value.max()) > _MAX_COUNT:
        raise CheckpointError(f"{path}: {name} counts more than {_MAX_COUNT}")
