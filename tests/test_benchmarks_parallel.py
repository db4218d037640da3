"""The benchmark of tensor parallelism: its table, and the size of the models that it builds."""

from __future__ import annotations

from benchmarks import parallel
from benchmarks.parallel import SHAPES, Figure


def figure(provider: str, gpus: int, milliseconds: float, *steps: float) -> Figure:
    return Figure("llama-3-70b", 8, provider, gpus, milliseconds, steps, 0.25, 9.0, 0.5, 0.125)


def test_the_table_has_ratios_to_one_gpu() -> None:
    figures = [figure("qgemm", 1, 200.0, 900.0), figure("qgemm", 2, 100.0, 600.0)]
    header, rows = parallel.table([*figures, figure("qgemm, shared scales", 2, 125.0, 1000.0)], [1])
    assert header[:5] == ["model", "provider", "GPUs", "prefill", "step, batch 1"]
    assert [row[3:5] for row in rows] == [
        ["200.0 ms (1.00)", "900 us (1.00)"],
        ["100.0 ms (2.00)", "600 us (1.50)"],
        ["125.0 ms (1.60)", "1000 us (0.90)"],
    ]
    assert rows[1][5:] == ["0.25", "9.0", "5.0e-01", "1.2e-01", ""]


def test_the_70b_shape() -> None:
    config = SHAPES["llama-3-70b"].make_config(8)
    weights = config.hidden_size * (2 * config.hidden_size + 2 * 1024 + 3 * config.intermediate_size)
    assert (weights, config.head_dim * config.num_key_value_heads) == (855_638_016, 1024)
