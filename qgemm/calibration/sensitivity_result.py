"""``Sensitivity``: the result of ``sensitivity``, as a table, as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from qgemm.arguments import shortened
from qgemm.calibration.sensitivity_plot import plot_damages
from qgemm.tables import html_table, size, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KL, ERROR = "kl", "error"


@dataclass(frozen=True)
class LayerSensitivity:
    """One layer under one scheme.

    - ``damage``: the damage to the model's output; see ``Sensitivity.metric``.
    - ``layer_error``: ``norm(quantized(x) - float(x)) / norm(float(x))`` of the layer alone.
    - ``bytes_before``, ``bytes_after``: the size of its parameters.
    """

    name: str
    scheme: str
    damage: float
    layer_error: float
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Sensitivity:
    """The result of ``sensitivity``. ``print`` shows a table, the worst layers first; a notebook shows an HTML table.

    - ``metric``: ``"kl"`` (nats per token) or ``"error"`` (relative, of the output).
    - ``tokens``: the number of tokens that were measured.
    - ``other_bytes``: the bytes of the model's other parameters and buffers.
    - ``records``: in the model's order; for each layer, in the order of the schemes.
    """

    metric: str
    tokens: int
    other_bytes: int
    records: tuple[LayerSensitivity, ...]

    def ranked(self) -> list[LayerSensitivity]:
        """The records, those with the largest damage first."""
        return sorted(self.records, key=lambda record: -record.damage)

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-ready values."""
        return asdict(self) | {"records": [asdict(record) for record in self.records]}

    @classmethod
    def from_dict(cls, values: Any) -> Sensitivity:
        """Reads measurements that ``to_dict`` wrote. Raises ``ValueError`` for anything else."""
        values = _check("a sensitivity", values, _FIELDS)
        if values["metric"] not in (KL, ERROR):
            raise ValueError(
                f"metric of a sensitivity is {shortened(values['metric'])}; it must be {KL!r} or {ERROR!r}"
            )
        records = [
            LayerSensitivity(**_check(f"record {index} of a sensitivity", each, _RECORD_FIELDS))
            for index, each in enumerate(values["records"])
        ]
        return cls(**(values | {"records": tuple(records)}))

    def __str__(self) -> str:
        """An aligned table, with a row per layer and scheme, the worst first."""
        return text_table(*self._table(), {self.metric, "layer error", "before", "after"}, self._summary())

    def _repr_html_(self) -> str:
        return html_table(*self._table(), self._summary())

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        rows: list[tuple[str, ...]] = [
            (
                record.name,
                record.scheme,
                f"{record.damage:.3g}",
                f"{record.layer_error:.4f}",
                size(record.bytes_before),
                size(record.bytes_after),
            )
            for record in self.ranked()
        ]
        return ("layer", "scheme", self.metric, "layer error", "before", "after"), rows

    def _summary(self) -> list[str]:
        meaning = "KL divergence of the logits, in nats" if self.metric == KL else "relative error of the output"
        return [f"{self.metric}: {meaning}, with this layer alone quantized; over {self.tokens} tokens"]

    def plot(self, path: str | Path | None = None) -> Axes:
        """Draws the damage of the 40 worst layers, with a color for each scheme, and returns matplotlib's axes.

        ``path``: where to write the figure, in the format of its suffix; None only draws. A damage of 0, which a
        logarithmic axis can't show, is drawn as an arrow at the left edge. Raises ``ImportError`` without matplotlib.
        """
        damages = [(record.name, record.scheme, record.damage) for record in self.records]
        return plot_damages(damages, self._summary()[0], path)


_FIELDS = {"metric": str, "tokens": int, "other_bytes": int, "records": list}
_RECORD_FIELDS = get_type_hints(LayerSensitivity)


def _check(where: str, values: Any, fields: Mapping[str, type]) -> dict[str, Any]:
    """Returns ``values`` if they are a dictionary of just these fields, each of its type, with no number below 0."""
    if not isinstance(values, dict) or set(values) != set(fields):
        raise ValueError(f"{where} must hold exactly {list(fields)}; it is {shortened(values)}")
    for key, kind in fields.items():
        value = values[key]
        fits = type(value) in (int, float) if kind is float else type(value) is kind
        if not fits or (kind in (int, float) and not value >= 0):
            wanted = "a string" if kind is str else "a list" if kind is list else "a number, 0 or more"
            raise ValueError(f"{key} of {where} is {shortened(value)}; it must be {wanted}")
    return values
