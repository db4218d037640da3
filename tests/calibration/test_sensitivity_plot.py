"""The plot of a result of ``sensitivity``: what is in it, and that it can be read."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from qgemm.calibration import LayerSensitivity, Sensitivity


def spread_out(low: float, high: float, count: int = 60) -> Sensitivity:
    """So many layers under two schemes, of which one does no damage to the first."""
    damages = [low * (high / low) ** (place / (count - 1)) for place in range(count)]
    records = [
        LayerSensitivity(f"model.layers.{place}.self_attn.k_proj", scheme, damage * factor, 0.01, 1000, 300)
        for place, damage in enumerate(damages)
        for scheme, factor in (("int8", float(place > 0)), ("int4", 1.0))
    ]
    return Sensitivity("kl", 4096, 0, tuple(records))


@pytest.mark.slow
@pytest.mark.parametrize("high", [1.1e-3, 1e-2, 0.7, 30, 1e8])
def test_labels_of_the_plot_do_not_overlap(high: float) -> None:
    pytest.importorskip("matplotlib")
    axis = spread_out(1e-3, high).plot()
    axis.figure.draw_without_rendering()
    low, right = axis.get_xlim()
    for labels, direction in ((axis.get_xticklabels(), "x"), (axis.get_yticklabels(), "y")):
        shown = [
            label
            for label in labels
            if label.get_text() and (direction == "y" or low <= label.get_position()[0] <= right)
        ]
        ends = sorted(getattr(label.get_window_extent(), f"interval{direction}").tolist() for label in shown)
        assert len(ends) >= 2
        assert all(start > end for (_, end), (start, _) in itertools.pairwise(ends))


@pytest.mark.slow
def test_the_plot_has_every_one_of_its_layers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = spread_out(1e-3, 1e-2, count=30)
    axis = result.plot(tmp_path / "sensitivity.png")
    assert (tmp_path / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == list(dict.fromkeys(record.name for record in result.ranked()))
    points = [(float(x), names[int(y)]) for line in axis.lines for x, y in zip(*line.get_data(), strict=True)]
    left = axis.get_xlim()[0]
    assert sorted(points) == sorted((record.damage or left, record.name) for record in result.records)
    assert not list(tmp_path.glob("None*"))
    # Nothing but zeros has no logarithm.
    zeros = Sensitivity("kl", 1, 0, (LayerSensitivity("up", "int8", 0.0, 0.01, 100, 30),))
    assert zeros.plot().get_xscale() == "linear"


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "matplotlib>=3\.8"'):
        spread_out(1e-3, 1e-2).plot()
