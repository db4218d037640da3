"""``report``: what ``quantize_model`` did to each layer, what it left in float and why, and how much that saves.

Every weight in a matrix product has a record, quantized or not, because a silently skipped layer would look like a
quantized one. Records are values; they are stored in a checkpoint as JSON (``to_dict``, ``from_dict``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from qgemm.arguments import check_model, shortened
from qgemm.model.plan import SwapPlan
from qgemm.model.selection import listed
from qgemm.model.survey import Layer
from qgemm.nn import QuantExperts, QuantLayer
from qgemm.nn.quant_layer import float_dtype
from qgemm.tables import html_table, size, text_table
from qgemm.warn import warn_user

KEPT = "float"

_SHOWN_CAUSES = 3


@dataclass(frozen=True)
class LayerRecord:
    """What became of one layer.

    - ``name``: its dotted name in the model; ``kind``: the class it had.
    - ``action``: the scheme that it was quantized with (``"int8"``), or ``"float"`` if it was left as it was.
    - ``reason``: why it was left in float; empty if it was quantized.
    - ``bytes_before``, ``bytes_after``: the size of its parameters. What it shares with an earlier layer counts there.
    - ``weight_error``: ``norm(dequantized - weight) / norm(weight)`` (Frobenius); for experts, the larger of their two
      weights' errors; None if unknown.
    - ``note``: messages of a recipe's methods about the layer, such as what they couldn't do.
    - ``output_error``: ``norm(quantized(x) - float(x)) / norm(float(x))`` of the layer on a sample of its inputs in
      calibration; None without a recipe.
    """

    name: str
    kind: str
    action: str
    reason: str
    bytes_before: int
    bytes_after: int
    weight_error: float | None
    note: str = ""
    output_error: float | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the layer was quantized."""
        return self.action != KEPT


@dataclass(frozen=True)
class QuantReport:
    """The records of a model's layers, in the model's order. ``print`` shows a table, a notebook an HTML table.

    ``recipe``: the methods that were used, as from ``qgemm.calibration.Recipe.to_dict``; None without a recipe.
    """

    records: tuple[LayerRecord, ...]
    recipe: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def quantized(self) -> tuple[LayerRecord, ...]:
        """The records of the layers that were quantized."""
        return tuple(record for record in self.records if record.is_quantized)

    @property
    def kept(self) -> tuple[LayerRecord, ...]:
        """The records of the layers that stay in float."""
        return tuple(record for record in self.records if not record.is_quantized)

    @property
    def bytes_before(self) -> int:
        """The size of all these layers in float, in bytes."""
        return sum(record.bytes_before for record in self.records)

    @property
    def bytes_after(self) -> int:
        """The size of all these layers now, in bytes."""
        return sum(record.bytes_after for record in self.records)

    @property
    def coverage(self) -> float:
        """The fraction of ``bytes_before`` that was quantized, 0 to 1."""
        before = self.bytes_before
        return sum(record.bytes_before for record in self.quantized) / before if before else 0.0

    @property
    def largest_error(self) -> float | None:
        """The largest ``weight_error``, or None if none is known."""
        return max((record.weight_error for record in self.records if record.weight_error is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        records = [
            {key: value for key, value in asdict(record).items() if key not in _OPTIONAL or value not in ("", None)}
            for record in self.records
        ]
        return {"records": records, **({} if self.recipe is None else {"recipe": self.recipe})}

    @classmethod
    def from_dict(cls, values: Any) -> QuantReport:
        """Reads a report that ``to_dict`` wrote. Raises ``ValueError`` for anything else."""
        known = isinstance(values, dict) and {"records"} <= set(values) <= {"records", "recipe"}
        if not known or not isinstance(values["records"], list):
            raise ValueError(
                f"a report is a dictionary with one list, 'records', and optionally a recipe; this is "
                f"{shortened(values)}"
            )
        records = tuple(_parse_record(index, record) for index, record in enumerate(values["records"]))
        return cls(records, _parse_recipe(values.get("recipe")))

    def __str__(self) -> str:
        """An aligned table with a row per layer and totals at the end."""
        header, *rows = self._table()
        return text_table(header, rows, _NUMERIC, self._totals())

    def _repr_html_(self) -> str:
        header, *rows = self._table()
        return html_table(header, rows, self._totals())

    def _table(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("layer", "kind", "action", "before", "after", "error", "output", "note")]
        rows += [
            (
                record.name,
                record.kind,
                record.action if record.is_quantized else f"{record.action}: {record.reason}",
                size(record.bytes_before),
                size(record.bytes_after),
                "" if record.weight_error is None else f"{record.weight_error:.4f}",
                "" if record.output_error is None else f"{record.output_error:.4f}",
                record.note,
            )
            for record in self.records
        ]
        shown = [c for c in range(len(rows[0])) if c < _ALWAYS_SHOWN or any(row[c] for row in rows[1:])]
        return [tuple(row[column] for column in shown) for row in rows]

    def _totals(self) -> list[str]:
        before, after = self.bytes_before, self.bytes_after
        lines = [
            f"{len(self.quantized)} of {len(self.records)} layers quantized, {self.coverage:.1%} of their bytes",
            f"{size(before)} before, {size(after)} after"
            + (f" ({before / after:.2f}x smaller)" if before > after > 0 else ""),
        ]
        if self.largest_error is not None:
            lines.append(f"largest relative weight error: {self.largest_error:.4f}")
        if self.recipe is not None:
            names = ", ".join(name for method in self.recipe["methods"] for name in method)
            lines.append(f"recipe: {names or 'rounding to nearest'}")
        return lines


# Columns of the table: the numeric ones, and how many are shown even if they are empty.
_NUMERIC = frozenset({"before", "after", "error", "output"})
_ALWAYS_SHOWN = 6
_OPTIONAL = {"note", "output_error"}
_ADAPTED = ".base_layer"  # PEFT's name of a layer below an adapter
# For records that are read, in which numbers may have hundreds of digits.
_MAX_ERROR = 1e300


def report(model: nn.Module) -> QuantReport:
    """Reports what ``quantize_model`` did to ``model``, layer by layer, and what layers are that changed since then.

    For a model that was assembled by hand, or that another program quantized, it lists the quantized layers, without
    errors. Their size before is computed for the dtype of the bias, or else of the model's first parameter that isn't
    quantized. Raises ``ValueError`` if there are none.
    """
    check_model(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLayer)}
    stored = stored_report(model)
    if stored is not None and (layers or stored is getattr(model, "_qgemm_report", None)):
        return stored
    if not layers:
        raise ValueError(
            f"{type(model).__name__} holds no quantized layer: call quantize_model or load_quantized first"
        )
    dtype = float_dtype(model) or torch.float32
    return QuantReport(tuple(_derive_record(name, layer, dtype) for name, layer in layers.items()))


def stored_report(model: nn.Module) -> QuantReport | None:
    """What ``quantize_model`` stored for ``model``, or for the model inside of an adapter's; None if that is nothing.

    Layers that were quantized since then, as parts of the model or by hand, have records without errors, layers that
    were replaced by others are in float, and those that are gone have no record.
    """
    stored = getattr(model, "_qgemm_report", None)
    if not isinstance(stored, QuantReport):
        return None
    holder = next((each for each in model.modules() if vars(each).get("_qgemm_report") is stored), model)
    modules = {name.removesuffix(_ADAPTED): module for name, module in holder.named_modules() if name}
    layers = {name: module for name, module in modules.items() if isinstance(module, QuantLayer)}
    dtype = float_dtype(holder) or torch.float32
    records = []
    for record in stored.records:
        layer = layers.pop(record.name, None)
        if layer is not None and layer.scheme.name != record.action:
            record = _derive_record(record.name, layer, dtype)
        elif layer is None and record.is_quantized:
            if record.name not in modules:
                continue
            reason, after = "it was replaced after quantize_model", parameter_bytes(modules[record.name])
            record = LayerRecord(record.name, record.kind, KEPT, reason, record.bytes_before, after, None)
        records.append(record)
    records += [_derive_record(name, layer, dtype) for name, layer in layers.items()]
    return stored if tuple(records) == stored.records else QuantReport(tuple(records), stored.recipe)


def give_report(
    model: nn.Module, plan: SwapPlan, records: Mapping[str, LayerRecord], recipe: dict[str, Any] | None = None
) -> None:
    """Stores what became of the layers in ``plan`` for ``report(model)``; warns if little was quantized.

    ``records``: those of the swapped layers, by name.
    """
    every = []
    for layer in plan.layers:
        record = records.get(layer.name) or kept_record(layer)
        notes = (plan.notes.get(layer.name, "") if record.is_quantized else "", record.note)
        every.append(replace(record, note="; ".join(filter(None, notes))))
    model._qgemm_report = QuantReport(tuple(every), recipe)  # type: ignore[assignment]
    _warn_of_coverage(plan.layers)


def drop_reports(model: nn.Module) -> None:
    """Removes what ``give_report`` stored for ``model`` and parts of it: what it says isn't true any more."""
    for module in model.modules():
        vars(module).pop("_qgemm_report", None)


def kept_record(layer: Layer) -> LayerRecord:
    """The record of a layer that stays in float, with its reason."""
    return LayerRecord(layer.name, layer.kind, KEPT, layer.reason, layer.bytes, layer.bytes, None)


def _warn_of_coverage(layers: list[Layer]) -> None:
    """Warns if less than half of the bytes in products is quantized, not counting what users wanted in float."""
    counted = [layer for layer in layers if not layer.is_wish]
    kept = [layer for layer in counted if layer.reason]
    total, left = sum(layer.bytes for layer in counted), sum(layer.bytes for layer in kept)
    if 2 * left <= total:
        return
    sizes: Counter[str] = Counter()
    for layer in kept:
        sizes[layer.reason] += layer.bytes
    causes = "; ".join(
        f"{count / total:.0%}: {reason} ({listed([layer.name for layer in kept if layer.reason == reason], 2)})"
        for reason, count in sizes.most_common(_SHOWN_CAUSES)
        if count
    )
    by_default = sorted((layer for layer in kept if layer.bytes and not layer.obstacle), key=lambda layer: -layer.bytes)
    gain = sum(layer.bytes for layer in by_default) / total
    names = [layer.name for layer in by_default]
    way_out = "That can't be quantized"
    if len(names) in (1, 2):
        way_out = f"include={names} quantizes {gain:.0%} more"
    elif names:
        way_out = f"include=[...] quantizes {gain:.0%} more: {listed(names, 2)}"
    warn_user(
        f"only {1 - left / total:.0%} of the bytes in this model's weights are quantized, so it stays almost as large. "
        f"What stays in float: {causes}. {way_out}"
    )


def parameter_bytes(module: nn.Module) -> int:
    """The size of the parameters that ``module`` itself holds, in bytes."""
    return sum(parameter.nbytes for parameter in module.parameters(recurse=False))


def _derive_record(name: str, layer: QuantLayer, dtype: torch.dtype) -> LayerRecord:
    """``dtype``: that of a float layer whose bias doesn't tell it."""
    kind = "Experts" if isinstance(layer, QuantExperts) else "Linear"
    before = layer.float_numel * (float_dtype(layer) or dtype).itemsize
    return LayerRecord(name, kind, layer.scheme.name, "", before, parameter_bytes(layer), None)


def _parse_record(index: int, values: Any) -> LayerRecord:
    texts, sizes = ("name", "kind", "action", "reason"), ("bytes_before", "bytes_after")
    required = {*texts, *sizes, "weight_error"}
    where = f"record {index} of the report"
    if not isinstance(values, dict) or not required <= set(values) <= required | _OPTIONAL:
        raise ValueError(
            f"{where} must hold {sorted(required)}, and nothing else but {sorted(_OPTIONAL)}: {shortened(values)}"
        )
    for key in (*texts, "note"):
        if not isinstance(values.get(key, ""), str):
            raise ValueError(f"{key} of {where} is {shortened(values[key])}; it must be a string")
    for key in sizes:
        if type(values[key]) is not int or values[key] < 0:
            raise ValueError(f"{key} of {where} is {shortened(values[key])}; it must be a whole number of bytes")
    for key in ("weight_error", "output_error"):
        error = values.get(key)
        if error is not None and not (type(error) in (int, float) and 0 <= error <= _MAX_ERROR):
            raise ValueError(f"{key} of {where} is {shortened(error)}; it must be a number, 0 or more, or None")
    return LayerRecord(**values)


def _parse_recipe(values: Any) -> dict[str, Any] | None:
    """Checks only the form: which methods exist is known where they are made."""
    if values is None:
        return None
    if not isinstance(values, dict) or set(values) != {"methods"} or not isinstance(values["methods"], list):
        raise ValueError(
            f"recipe of the report must be a dictionary with one list, 'methods'; it is {shortened(values)}"
        )
    for method in values["methods"]:
        if not isinstance(method, dict) or len(method) != 1 or not all(map(_is_settings, method.values())):
            raise ValueError(
                f"recipe of the report holds {shortened(method)}; a method is one name with a dictionary of settings"
            )
    return values


def _is_settings(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(value, str | int | float | None) for value in values.values())
