"""``FusionReport``: what ``fuse`` did to each layer of a model, and why it left what it left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from qgemm.tables import html_table, text_table

_HEADER = ("layer", "kind", "fused", "error", "note")


@dataclass(frozen=True)
class FusionRecord:
    """What became of one layer.

    - ``name``: its dotted name; ``kind``: its class.
    - ``parts``: what is fused of it: ``"attention"``, ``"mlp"``, ``"mixture"``; nothing if it is as it was. Outside of
      layers: ``"norm"``, ``"rotary"``, and ``"products"`` of layers that read one input in a module that is called.
    - ``reason``: why the rest isn't; empty if all is.
    - ``error``: how far its output was from the layer's when it was made, relative to what the layer adds to its input,
      where another scale counts tenfold; 0 if the bits were the same, None if that wasn't looked at.
    """

    name: str
    kind: str
    parts: tuple[str, ...]
    reason: str
    error: float | None


@dataclass(frozen=True)
class FusionReport:
    """The records of a model's layers, in the model's order. ``print`` shows a table, a notebook an HTML one.

    ``others``: the records of what is fused outside of the layers.
    """

    records: tuple[FusionRecord, ...]
    others: tuple[FusionRecord, ...] = ()

    @property
    def fused(self) -> tuple[FusionRecord, ...]:
        """The records of layers of which something is fused."""
        return tuple(record for record in self.records if record.parts)

    def __str__(self) -> str:
        """An aligned table, a row per layer, totals last."""
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
