"""``FusionReport``: what ``fuse`` did to each layer of a model, and why it left the rest as it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from qgemm.tables import html_table, text_table

_HEADER = ("layer", "kind", "fused", "error", "note")


@dataclass(frozen=True)
class FusionRecord:
    """What became of one layer.

    - ``name``: its dotted name; ``kind``: its class.
    - ``parts``: its fused parts: ``"attention"``, ``"mlp"``, ``"mixture"``; empty if it was left as it was. Outside of
      layers: ``"norm"``, ``"rotary"``, and ``"products"`` for layers that read the same input in a module that isn't
      fused.
    - ``reason``: why the rest isn't fused; empty if everything is.
    - ``error``: the difference between its output and the original layer's when it was made, relative to what the layer
      adds to its input; a difference in scale counts tenfold. 0 if the bits were the same, None if it wasn't compared.
    """

    name: str
    kind: str
    parts: tuple[str, ...]
    reason: str
    error: float | None


@dataclass(frozen=True)
class FusionReport:
    """The records of a model's layers, in the model's order. ``print`` shows a table, a notebook an HTML table.

    ``others``: the records of what is fused outside of layers.
    """

    records: tuple[FusionRecord, ...]
    others: tuple[FusionRecord, ...] = ()

    @property
    def fused(self) -> tuple[FusionRecord, ...]:
        """The records of layers that are at least partly fused."""
        return tuple(record for record in self.records if record.parts)

    def __str__(self) -> str:
        """An aligned table with a row per layer and totals at the end."""
        return text_table(_HEADER, self._rows(), {"error"}, self._totals())

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows(), self._totals())

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                record.name,
                record.kind,
                ", ".join(record.parts) or "nothing",
                "" if record.error is None else f"{record.error:.1e}" if record.error else "0",
                record.reason,
            )
            for record in (*self.records, *self.others)
        ]

    def _totals(self) -> list[str]:
        layers, others = (
            ", ".join(
                f"{count} x {part}" for part, count in Counter(part for each in records for part in each.parts).items()
            )
            for records in (self.records, self.others)
        )
        total = f"{len(self.fused)} of {len(self.records)} layers fused" + (f": {layers}" if layers else "")
        return [f"{total}; {others}" if others else total]
