"""The rows of the table: what is done to a model. A variant is a name and a function of a model and batches of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

import qgemm
from benchmarks.accuracy.results import SUBJECTS

Build = Callable[[Any, list[Any]], Any]
"""Quantizes a model, in place or not, and returns it; batches are mappings of keyword arguments."""
BASELINE = "bf16"
IN_16_BITS = "computed in bf16"


@dataclass(frozen=True)
class Variant:
    """One row. ``seeded``: whether it calibrates, and so is measured with data of several seeds.

    ``subjects``: the models that it is measured on. ``note``: stands in the table behind the name. ``bytes_of``: the
    size of the weights, where it isn't that of the model's state.
    """

    name: str
    build: Build
    seeded: bool = True
    subjects: tuple[str, ...] = SUBJECTS
    note: str = ""
    bytes_of: Callable[[Any], int] | None = None


def variants() -> list[Variant]:
    """qgemm's, the float model first."""
    smooth, search = _Step("SmoothQuant", {"alpha": 0.5}), _Step("SmoothQuant", {"alpha": "search"})
    gptq, awq, bias, columns = (_Step(name, {}) for name in ("GPTQ", "AWQ", "BiasCorrection", "OutlierColumns"))
    return [
        Variant(BASELINE, lambda model, batches: _as_bf16(model), seeded=False),
        _qgemm("int8", "int8"),
        _qgemm("int8 + SmoothQuant", "int8", smooth),
        _qgemm("int8 + GPTQ", "int8", gptq),
        _qgemm("int8 + SmoothQuant + GPTQ", "int8", search, gptq, bias),
        _qgemm("int8, outlier columns", "int8", columns),
        _qgemm("int8-static", "int8-static"),
        _qgemm("int8-static + SmoothQuant", "int8-static", smooth),
        _qgemm("int8-static + GPTQ", "int8-static", gptq),
        _qgemm("int8-static + SmoothQuant + GPTQ", "int8-static", search, gptq, bias),
        _qgemm("int8-static-asymmetric + SmoothQuant + GPTQ", "int8-static-asymmetric", search, gptq, bias),
        _qgemm("int8-static-hadamard + SmoothQuant + GPTQ", "int8-static-hadamard", search, gptq, bias),
        _qgemm("int4 RTN", "int4", note=IN_16_BITS),
        _qgemm("int4 GPTQ", "int4", gptq, note=IN_16_BITS),
        _qgemm("int4 AWQ", "int4", awq, note=IN_16_BITS),
        _qgemm("int4 AWQ + GPTQ", "int4", awq, gptq, note=IN_16_BITS),
    ]


def named(table: Sequence[Variant], names: Sequence[str] | None) -> list[Variant]:
    """Those of the table with these names, all if None. Raises ``ValueError`` for a name that isn't there."""
    known = [one.name for one in table]
    if missing := [name for name in names or () if name not in known]:
        raise ValueError(f"there is no variant {missing[0]!r}; there are {', '.join(known)}")
    return [one for one in table if names is None or one.name in names]


class _Step(NamedTuple):
    method: str
    settings: dict[str, Any]


def _qgemm(name: str, scheme: str, *steps: _Step, note: str = "") -> Variant:
    seeded = bool(steps) or "static" in scheme

    def build(model: nn.Module, batches: list[Any]) -> nn.Module:
        recipe = [getattr(qgemm.calibration, method)(**settings) for method, settings in steps]
        # What needs no data gets none, and its row is of one run.
        options: dict[str, Any] = {"calibration": batches} if seeded else {}
        if recipe:
            options["recipe"] = recipe
        return qgemm.quantize_model(model, scheme, progress=False, **options)

    return Variant(name, build, seeded, note=note)


def _as_bf16(model: Any) -> Any:
    # The frequencies of rotary embeddings stay in float32, as from_pretrained has them.
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    return model
