"""The rows of the table: what is done to a model. A variant is a name and a function of a model and batches of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import qgemm
from benchmarks.accuracy.results import OUTLIERS, PLAIN, SUBJECTS
from qgemm.calibration import AWQ, GPTQ, HadamardRotation, Method, MSEWeights, OutlierColumns, SmoothQuant
from qgemm.kernels.attention.checks import MAX_QUERIES

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
    """The float model, then qgemm's rows."""
    smooth, searched = SmoothQuant(alpha=0.5), SmoothQuant(alpha="search")
    rotated = HadamardRotation(online="all")
    return [
        Variant(BASELINE, lambda model, batches: _as_bf16(model), seeded=False),
        _qgemm("int8", "int8"),
        _qgemm("int8 + SmoothQuant", "int8", smooth),
        _qgemm("int8 + GPTQ", "int8", GPTQ()),
        _qgemm("int8 + SmoothQuant + GPTQ", "int8", searched, GPTQ()),
        _qgemm("int8, outlier columns", "int8", OutlierColumns()),
        _qgemm("int8, outlier columns + GPTQ", "int8", OutlierColumns(), GPTQ()),
        _qgemm("int8 + Hadamard + GPTQ", "int8", rotated, GPTQ()),
        _qgemm("int8-static", "int8-static"),
        _qgemm("int8-static + SmoothQuant", "int8-static", smooth),
        _qgemm("int8-static + GPTQ", "int8-static", GPTQ()),
        _qgemm("int8-static + SmoothQuant + GPTQ", "int8-static", searched, GPTQ()),
        _qgemm("int8-static, asymmetric + SmoothQuant + GPTQ", "int8-static-asymmetric", searched, GPTQ()),
        _qgemm("int8-static + Hadamard + GPTQ", "int8-static", rotated, GPTQ()),
        _qgemm("fp8", "fp8"),
        _qgemm("fp8 + GPTQ", "fp8", GPTQ()),
        _qgemm("fp8 + SmoothQuant + GPTQ", "fp8", searched, GPTQ()),
        _qgemm("fp8-static", "fp8-static"),
        _qgemm("fp8-static + GPTQ", "fp8-static", GPTQ()),
        _qgemm("fp8-static + SmoothQuant + GPTQ", "fp8-static", searched, GPTQ()),
        _qgemm("fp8-block", "fp8-block"),
        _qgemm("fp8-block + GPTQ", "fp8-block", GPTQ()),
        _qgemm("fp8-block + SmoothQuant + GPTQ", "fp8-block", searched, GPTQ()),
        _qgemm("int8-weight", "int8-weight", note=IN_16_BITS),
        _qgemm("int8-weight + GPTQ", "int8-weight", GPTQ(), note=IN_16_BITS),
        _qgemm("fp8-weight", "fp8-weight", note=IN_16_BITS),
        _qgemm("mxfp8", "mxfp8", note=IN_16_BITS),
        _qgemm("int4 RTN", "int4", note=IN_16_BITS),
        _qgemm("int4 MSE", "int4", MSEWeights(), note=IN_16_BITS),
        _qgemm("int4 GPTQ", "int4", GPTQ(), note=IN_16_BITS),
        _qgemm("int4 AWQ", "int4", AWQ(), note=IN_16_BITS),
        _qgemm("int4 AWQ + GPTQ", "int4", AWQ(), GPTQ(), note=IN_16_BITS),
        *_of_weights("int4-channel", "int4-asymmetric", "int4-32", "int4-32-asymmetric", "mxfp4", "nvfp4", "nf4"),
        *_of_weights("int4-int8", note=""),
        _cached("bf16, cache in bf16", None),
        _cached("bf16, cache in int8", torch.int8),
        _cached("int8, cache in int8", torch.int8, "int8"),
    ]


def named(table: Sequence[Variant], names: Sequence[str] | None) -> list[Variant]:
    """Those of the table with these names, all if None. Raises ``ValueError`` for a name that isn't there."""
    known = [one.name for one in table]
    if missing := [name for name in names or () if name not in known]:
        raise ValueError(f"there is no variant {missing[0]!r}; there are {', '.join(known)}")
    return [one for one in table if names is None or one.name in names]


def _of_weights(*schemes: str, note: str = IN_16_BITS) -> list[Variant]:
    """Two rows for each: rounded to nearest, and by the best recipe for 4 bits."""
    rows = []
    for scheme in schemes:
        rows += [_qgemm(f"{scheme} RTN", scheme, note=note)]
        rows += [_qgemm(f"{scheme} AWQ + GPTQ", scheme, AWQ(), GPTQ(), note=note)]
    return rows


def _qgemm(name: str, scheme: str, *recipe: Method, note: str = "") -> Variant:
    seeded = bool(recipe) or "static" in scheme

    def build(model: nn.Module, batches: list[Any]) -> nn.Module:
        # Without methods there is no recipe: the scheme as quantize_model applies it by itself.
        options: dict[str, Any] = {"recipe": list(recipe)} if recipe else {}
        if seeded:
            options["calibration"] = batches
        return qgemm.quantize_model(model, scheme, progress=False, **options)

    return Variant(name, build, seeded, note=note)


class Cached(nn.Module):
    """A language model that is fed ``MAX_QUERIES`` tokens at a time, and reads those before from a ``KeyValueCache``.

    Attention to the first ones, which are a prompt, is computed before rounding.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None) -> None:
        """``dtype``: of the cache, the model's if None."""
        super().__init__()
        model.set_attn_implementation("qgemm")
        self.model, self.dtype = model, dtype

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        """The model's ``logits`` of all tokens."""
        from qgemm.integrations.transformers.cache import ARGUMENT

        model: Any = self.model
        B, S = input_ids.shape
        cache = qgemm.KeyValueCache(model.config, B, S, self.dtype, input_ids.device)
        parts = [model(input_ids=part, **{ARGUMENT: cache}).logits for part in input_ids.split(MAX_QUERIES, dim=1)]
        return SimpleNamespace(logits=torch.cat(parts, dim=1))


def _cached(name: str, dtype: torch.dtype | None, scheme: str | None = None) -> Variant:
    def build(model: Any, batches: list[Any]) -> nn.Module:
        model = _as_bf16(model) if scheme is None else qgemm.quantize_model(model, scheme, progress=False)
        return Cached(model, dtype)

    return Variant(name, build, seeded=False, subjects=(PLAIN, OUTLIERS))


def _as_bf16(model: Any) -> Any:
    # The frequencies of rotary embeddings stay in float32, as from_pretrained has them.
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    return model
