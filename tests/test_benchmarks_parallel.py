"""The benchmark of tensor parallelism: its table, its arguments, the size of its models, and a tiny mixture."""

from __future__ import annotations

import pytest
from torch import distributed
from transformers.distributed.configuration_utils import DistributedConfig

from benchmarks import parallel
from benchmarks.models import measure
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


def test_a_row_of_whole_experts_is_compared_with_one_gpu() -> None:
    figures = [figure("qgemm", 1, 200.0, 900.0), figure("qgemm, by expert", 2, 100.0, 600.0)]
    assert parallel.table(figures, [1])[1][1][:5] == [
        "llama-3-70b, 8 layers", "qgemm, by expert", "2", "100.0 ms (2.00)", "600 us (1.50)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--by-expert"], "llama-3-70b has no experts"),
        (["--by-expert", "--model", "tiny-mixture", "--provider", "qgemm, shared scales"], "no layer is split along K"),
    ],
)
def test_what_by_expert_is_not_for(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parallel.main(arguments)
    assert reason in capsys.readouterr().err


def test_processes_start_a_measurement_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(measure.gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "barrier", lambda: calls.append("barrier"))
    measure.median_seconds(lambda: calls.append("run"), rounds=1)
    assert calls == ["collect", "barrier", "run"] * 2


@pytest.mark.complete
@pytest.mark.parametrize("by_expert", [False, True], ids=["columns", "experts"])
def test_a_mixture_on_two_processes(by_expert: bool, capsys: pytest.CaptureFixture[str]) -> None:
    figures = parallel.main(["--model", "tiny-mixture", "--commit", "-", *(["--by-expert"] if by_expert else [])])
    ends = ("", ", by expert") if by_expert else ("", "")
    wanted = [(f"{provider}{ends[gpus - 1]}", gpus) for provider in ("bf16", "qgemm") for gpus in (1, 2)]
    assert [(one.provider, one.gpus) for one in figures] == wanted + (
        [] if by_expert else [("qgemm, shared scales", 2)]
    )
    assert {one.layers for one in figures} == {2}
    # By expert, nothing is computed otherwise than in one process, where attention isn't split, too.
    is_split = not by_expert or hasattr(DistributedConfig, "ep_size")
    for one in figures:  # random layers
        assert one.kl < (1e-3 if is_split and one.provider != "bf16" else 1e-12)
        assert one.kl_float < 1e-3
        assert not one.note
    assert "tiny-mixture, 2 layers" in capsys.readouterr().out
