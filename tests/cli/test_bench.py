"""``qgemm bench``: the sizes of a model, outputs checked before they are timed, sums that add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint.test_bitsandbytes import float_model

import qgemm
from cli.command import run, run_failing, run_json, write_checkpoint, zeros
from qgemm_cli import timing
from qgemm_cli.commands import bench
from qgemm_cli.commands.bench import Weights, shapes_of


@pytest.fixture(autouse=True)
def _few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgemm_cli.commands.bench.copy_count", lambda size, device: 2)


def test_the_sizes_are_those_of_the_model(float_folder: Path, int8_folder: Path) -> None:
    wanted = {
        Weights("mlp.down_proj", 32, 48, 2),
        Weights("mlp.gate_proj, mlp.up_proj", 48, 32, 4),
        Weights("self_attn.k_proj, self_attn.v_proj", 16, 32, 4),
        Weights("self_attn.o_proj, self_attn.q_proj", 32, 32, 4),
    }
    for folder in (float_folder, int8_folder):
        found = shapes_of(folder)
        assert {replace(one, name=", ".join(sorted(one.name.split(", ")))) for one in found} == wanted


def test_conv1d_is_measured_as_it_multiplies(tmp_path: Path) -> None:
    float_model("gpt2").save_pretrained(tmp_path)
    assert Weights("mlp.c_fc", 128, 32, 2) in shapes_of(tmp_path)


def test_a_model(int8_folder: Path) -> None:
    found = run_json("bench", int8_folder, "--m", "1,7", "--device", "cpu", "--quick")
    assert {(result["N"], result["K"], result["M"]) for result in found["results"]} == {
        (n, k, m) for n, k in ((32, 48), (48, 32), (16, 32), (32, 32)) for m in (1, 7)
    }
    for result in found["results"]:
        assert set(result["us"]) == {"int8", "bf16", "fp32"}
        assert 0.001 < result["error"]["int8"] < 0.04
        assert result["error"]["fp32"] < 1e-5
        times = result["us"]
        assert result["speedup"] == {name: times[name] / times["int8"] for name in ("bf16", "fp32")}
    first = found["totals"][0]
    assert (first["M"], first["layers"]) == (1, 14)
    members = [result for result in found["results"] if result["M"] == 1]
    assert first["us"]["int8"] == pytest.approx(sum(result["us"]["int8"] * result["count"] for result in members))


def test_a_shape_and_its_table() -> None:
    shown = run("bench", "--shape", "24x40", "--m", "3", "--device", "cpu", "--quick").stdout
    assert "24 x 40" in shown
    assert "all of them" not in shown


def test_the_spread_is_that_of_the_middle_half(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timing.spread([5.0]) == 0
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(2 / 3)
    monkeypatch.setattr(bench, "all_seconds", lambda passes, *_: {name: [1e-6, 2e-6, 3e-6] for name in passes})
    monkeypatch.setattr(timing.Bystanders, "complaints", lambda self: ["the machine was busy"])
    arguments = ("bench", "--shape", "24x40", "--m", "3,4", "--device", "cpu", "--quick")
    found = run_json(*arguments)
    wanted = pytest.approx({"int8": 0.5, "bf16": 0.5, "fp32": 0.5})
    assert [result["spread"] for result in found["results"]] == [wanted] * 2
    assert found["results"][0]["us"]["int8"] == pytest.approx(2)
    shown = " ".join(run(*arguments).stdout.split())
    assert "50%" in shown
    assert "warning: the machine was busy" in shown
    assert "warning: the times of 2 of 2 rows vary by more than 20% (interquartile range)" in shown
    monkeypatch.setattr(bench, "all_seconds", lambda passes, *_: {name: [2e-6, 2.1e-6] for name in passes})
    monkeypatch.setattr(timing.Bystanders, "complaints", lambda self: [])
    monkeypatch.setattr(bench, "has_int8_products", lambda: True)
    assert "warning" not in run(*arguments).stdout
    assert run_json(*arguments)["warnings"] == []
    monkeypatch.setattr(bench, "has_int8_products", lambda: False)
    assert "warning: this CPU has no int8 dot products" in " ".join(run(*arguments).stdout.split())


def test_a_busy_machine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([(10, 1000), (20, 2000), (20, 2000), (50, 3000)])
    monkeypatch.setattr(timing, "_stolen_ticks", lambda: next(ticks))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (0.9, 9.0, 9.0), raising=False)
    assert timing.Bystanders().complaints() == []
    monkeypatch.setattr("os.getloadavg", lambda: (1.1, 0.0, 0.0), raising=False)
    assert timing.Bystanders().complaints() == [
        "the machine was busy before anything was timed: a load of 1.1 on 2 cores",
        "other virtual machines took 3% of the processors' time",
    ]


def test_a_wrong_output_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = qgemm.QuantLinear.forward

    def wrong(self: qgemm.QuantLinear, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        out[-1, :8] = 0
        return out

    monkeypatch.setattr(qgemm.QuantLinear, "forward", wrong)
    arguments = ("bench", "--shape", "64x64", "--m", "5", "--device", "cpu", "--quick")
    found = run_json(*arguments, exit_code=1)["results"][0]
    assert found["wrong"] == ["int8"]
    assert found["us"]["int8"] is None
    assert found["us"]["fp32"] > 0
    assert found["speedup"] == {"bf16": None, "fp32": None}
    assert "problem: int8 at 64 x 64, M = 5 gives a wrong output" in run(*arguments, exit_code=1).stdout


def test_what_cannot_be_timed(tmp_path: Path) -> None:
    for rows in ("0", "a", "1,", "-3", "1e9", "9" * 5000):
        assert "--m is" in run_failing("bench", "--m", rows)
    for shape in ("0x3", "4x", "4096", "1x2x3", "-1x4", "9" * 5000 + "x1"):
        assert "--shape is" in run_failing("bench", "--shape", shape)
    for device in ("cuda:99", "meta", "gpu"):
        assert f'device is "{device}"' in run_failing("bench", "--shape", "4x4", "--device", device)
    folder = write_checkpoint(tmp_path, {"model.norm.weight": zeros(torch.float32, 4)})
    assert "has no linear layers to time" in run_failing("bench", folder)
    assert set(bench.DEFAULT_SHAPES) == {"cpu", "cuda"}
