"""The benchmark of encoders: its table, what it refuses, and its inputs."""

from __future__ import annotations

import pytest
import torch

from benchmarks import encoders
from benchmarks.encoders import FLOAT, PADDING, WAYS, Result
from qgemm_cli.timing import QUICK


def test_table() -> None:
    results = [Result("m", way, 2, 8, 4.0 / (i + 1), 2.0 / (i + 1), 0.01) for i, way in enumerate(WAYS)]
    header, rows = encoders.table(results)
    assert [row[2] for row in rows] == list(WAYS)
    assert rows[3] == ["m", "2 x 8", "int8, fused", "1.00", "4.00", "0.50", "4.00", "0.010"]
    assert len(header) == len(rows[0])


def test_padding_needs_a_mask() -> None:
    given = encoders.inputs(3, 16, torch.device("cpu"))
    assert given["attention_mask"].sum(1).tolist() == [16, 16 - PADDING, 16 - PADDING]


@pytest.mark.parametrize("name", encoders.ENCODERS)
def test_every_way_runs_every_encoder(name: str) -> None:
    given = encoders.inputs(2, 8, torch.device("cpu"))
    shape = encoders.ENCODERS[name].resized(name, 1, vocab_size=1000)  # whose embeddings take most of the time
    outs = {}
    with torch.inference_mode():
        for way, prepare in WAYS.items():
            model = shape.build(torch.device("cpu"))
            prepare(model)
            outs[way] = encoders.hidden_states(model, given)
    for way, out in outs.items():
        error = float((out - outs[FLOAT]).norm() / outs[FLOAT].norm())
        assert (error == 0) == way.startswith(FLOAT)
        assert error < encoders.MAX_ERROR


def test_every_way_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    given = [{"x": torch.ones(4)}]
    runs = {FLOAT: lambda x: x["x"], "int8": lambda x: 1.25 * x["x"]}
    found = encoders.check_and_time(runs, given, dict.fromkeys(runs, 0.3), QUICK, torch.device("cpu"))
    assert [(way, error) for way, (_, _, error) in found.items()] == [(FLOAT, 0.0), ("int8", 0.25)]
    assert all(call > 0 and kernels > 0 for call, kernels, _ in found.values())
    with pytest.raises(ValueError, match=r"wrong output of int8: relative error 0.25, at most 0.2"):
        encoders.check_and_time(runs, given, dict.fromkeys(runs, 0.2), QUICK, torch.device("cpu"))


def test_without_a_gpu_it_says_where_to_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        encoders.main([])
    assert "benchmarks.models times encoders on a CPU" in capsys.readouterr().err
