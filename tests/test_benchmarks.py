"""The benchmark: its arithmetic, what it refuses, what it prints, and a run from end to end on tiny shapes."""

import csv
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import configs, measure, peers, plots, tables
from benchmarks.__main__ import main
from benchmarks.measure import measure_quantization, measure_shape
from benchmarks.providers import Provider, cpu_providers, float_provider, quantize_fp8
from benchmarks.results import ConfigCheck, Measurement, Quantization, Run, speedups
from benchmarks.roofline import Roofline, bytes_moved, known_peaks, operations
from benchmarks.shapes import HELD_OUT_SHAPES, ROWS, SHAPES, WeightShape, parse_pair, parse_shape
from benchmarks.timing import copy_bandwidth, median_seconds
from qgemm_cli.check import largest_errors
from qgemm_cli.timing import MAX_CALLS, QUICK, Effort, Pass, copy_count

CPU = torch.device("cpu")
GPU_NAME = "NVIDIA H200"


def measured(
    provider: str, M: int, us: float | None, level: str = "gemm", N: int = 4096, **rest: object
) -> Measurement:
    if us is not None:
        rest = {"tops": 1.0, "tb_per_s": 1.0, "share": 0.5} | rest
    return Measurement(provider, level, "llama-3-8b", N, 4096, M, us, **rest)


def run_of(*measurements: Measurement, checks: tuple[ConfigCheck, ...] = ()) -> Run:
    about = {"device": GPU_NAME, "versions": {"torch": "2.11.0"}, "commit": "abc", "date": "2026-01-01T00:00:00+00:00"}
    return Run(about, 4e12, {"bf16": 989.0, "int8": 1979.0}, list(measurements), {}, list(checks))


def test_the_table_has_the_layers_of_the_models() -> None:
    assert len(SHAPES) == len({(shape.N, shape.K) for shape in SHAPES}) == 11
    assert WeightShape("llama-3-70b", 57344, 8192) in SHAPES
    assert ROWS[0] == 1
    assert ROWS[-1] == 8192
    assert len(ROWS) == 12
    assert not {(shape.N, shape.K) for shape in HELD_OUT_SHAPES} & {(shape.N, shape.K) for shape in SHAPES}


def test_parse_shape() -> None:
    assert parse_shape("57344x8192") == WeightShape("llama-3-70b", 57344, 8192)
    assert parse_shape("12x34") == WeightShape("custom", 12, 34)
    assert parse_pair("12x34") == (12, 34)
    for text in ("12", "axb", "0x4", "1x2x3"):
        with pytest.raises(ValueError, match=f"shape is '{text}'"):
            parse_shape(text)


def test_work_of_a_product() -> None:
    # By hand: 2 * 16 * 4096 * 4096, and 16 * 4096 * 1 + 4096 * 4096 * 1 + 16 * 4096 * 2.
    assert operations(16, 4096, 4096) == 536_870_912
    assert bytes_moved(16, 4096, 4096, torch.int8, torch.int8, torch.bfloat16) == 16_973_824
    assert bytes_moved(1, 2, 3, torch.bfloat16, torch.int8, torch.int32) == 6 + 6 + 8


def test_the_limit_is_the_longer_of_memory_and_arithmetic() -> None:
    roofline = Roofline(bandwidth=4e12, peak_tops={"int8": 2000})
    assert roofline.limit(operations=2e12, bytes_moved=4e9, kind="int8") == pytest.approx(1e-3)
    assert roofline.limit(operations=2e12, bytes_moved=8e9, kind="int8") == pytest.approx(2e-3)
    # Without a peak only the memory counts.
    assert roofline.limit(operations=2e15, bytes_moved=4e9, kind="fp8") == pytest.approx(1e-3)


def test_peaks_go_by_the_name_of_the_device() -> None:
    assert known_peaks("NVIDIA H100 PCIe")["int8"] == 1513
    assert known_peaks("NVIDIA H100 80GB HBM3")["int8"] == 1979
    assert known_peaks("NVIDIA GeForce RTX 2080") == {}


def test_speedups_count_only_sizes_that_both_have() -> None:
    run = [measured("bf16", 1, 20.0), measured("bf16", 1, 80.0, N=8192), measured("bf16", 1, 70.0, N=1)]
    run += [measured("qgemm", 1, 10.0), measured("qgemm", 1, 20.0, N=8192), measured("qgemm", 1, None, N=1)]
    run += [measured("qgemm", 1, 1.0, level="layer"), measured("qgemm", 2, 5.0)]
    spread = speedups(run, "gemm", "bf16", "qgemm")
    assert list(spread) == [1]
    assert dataclasses.astuple(spread[1]) == pytest.approx((math.sqrt(8), 2.0, 4.0))
    assert speedups(run, "gemm", "bf16", "qgemm", ["llama-3-70b"]) == {}


def test_copies_pass_the_caches_within_bounds() -> None:
    gpu = torch.device("cuda", 0)
    assert copy_count(4096 * 4096, gpu) * 4096 * 4096 > 320 << 20
    assert copy_count(10**9, gpu) == 2  # one copy would find its end in the cache
    assert copy_count(64, gpu) == MAX_CALLS
    assert copy_count(0, CPU) == MAX_CALLS


def test_a_pass_goes_through_every_copy() -> None:
    seen: list[int] = []

    def run(weight: int) -> Tensor:
        seen.append(weight)
        return torch.full((1,), float(weight))

    one = Pass(run, [3, 4, 5], CPU)
    seen.clear()
    assert one.checked_output().item() == 5.0
    assert seen == [3, 4, 5]
    assert one.calls == 3


def test_what_a_pass_leaves_unwritten_is_seen() -> None:
    floats, integers = torch.ones(2), torch.ones(2, dtype=torch.int32)
    assert Pass(lambda weight: floats, [0], CPU).checked_output().isnan().all()
    assert (Pass(lambda weight: integers, [0], CPU).checked_output() < -(2**30)).all()


def test_a_time_is_the_median_over_rounds_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    order: list[str] = []
    # By its name, the seconds that each call of a pass takes: first when it is made, once more for a first look.
    durations = {"a": iter([9.0] * 3 + [1.0] * 2 + [7.0] * 2 + [2.0] * 2), "b": iter([1.0] * 9)}
    monkeypatch.setattr("qgemm_cli.timing.time.perf_counter", lambda: clock)

    def run(name: str) -> Tensor:
        nonlocal clock
        clock += next(durations[name])
        order.append(name)
        return torch.zeros(1)

    passes = {name: Pass(run, [name] * 2, CPU) for name in ("a", "b")}
    order.clear()
    assert median_seconds(passes, Effort(rounds=3, seconds=0), CPU) == {"a": 2.0, "b": 1.0}
    # Providers take turns, there and back.
    assert "".join(order[4:]) == "aabb" + "bbaa" + "aabb"


def test_copy_bandwidth_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("qgemm_cli.timing.time.perf_counter", lambda: next(clock))
    assert copy_bandwidth(CPU) == 2 * (64 << 20)  # each copy of 64 MiB takes one second of this clock


def test_one_wrong_tile_stands_out() -> None:
    x, weight = torch.randn(256, 64), torch.randn(4096, 64)
    right = F.linear(x, weight)
    tile, element = right.clone(), right.clone()
    tile[128:192, 512:576] = 0
    element[3, 7] = torch.nan
    errors = largest_errors(x, weight, {"right": right, "tile": tile, "nan": element, "shape": right[:, :9]})
    assert errors["right"] < 1e-5
    assert errors["tile"] > 0.1
    assert errors["nan"] == errors["shape"] == torch.inf


@pytest.mark.parametrize("provider", cpu_providers(), ids=lambda one: f"{one.name}-{one.levels[0]}")
def test_providers_are_right_on_the_cpu(provider: Provider) -> None:
    x, weight = torch.randn(17, 512), torch.randn(96, 512)
    a, b = provider.prepare_input(x), provider.prepare_weight(weight)
    out = provider.run(a, b)
    assert out.dtype == provider.output_dtype
    error = largest_errors(x, weight, {"out": provider.finish(out, a, b)})["out"]
    # A bound that is 100 times the error would let anything pass.
    assert error < provider.max_error
    assert error > provider.max_error / 100 or provider.output_dtype == torch.float32


def test_copies_of_a_weight_share_no_storage() -> None:
    weight = torch.randn(64, 64)
    for provider in cpu_providers():
        first, second = provider.prepare_weight(weight), provider.prepare_weight(weight)
        tensors = [x if isinstance(x, Tensor) else getattr(x, "weight", None) for x in (first, second)]
        if tensors[0] is None:
            tensors = [first[0], second[0]]
        assert len({weight.data_ptr(), *(tensor.data_ptr() for tensor in tensors)}) == 3, provider.name


def test_fp8_values_fill_their_range() -> None:
    x = torch.randn(5, 256)
    q, scale = quantize_fp8(x)
    assert q.float().abs().amax(1).tolist() == [448.0] * 5
    assert scale.shape == (5, 1)
    assert (q.float() * scale - x).norm() / x.norm() < 0.03


def test_wrong_and_failing_providers_are_refused_with_the_reason() -> None:
    right = float_provider("right", torch.float32)
    wrong = dataclasses.replace(right, name="wrong", run=lambda x, weight: F.linear(x, weight) * 1.01)

    def breaks(x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("M must be greater than 16\nand more")

    broken = dataclasses.replace(right, name="broken", run=breaks)
    unprepared = dataclasses.replace(right, name="unprepared", prepare_weight=lambda weight: breaks(weight, weight))
    (found,) = measure_shape(
        WeightShape("custom", 32, 64), [3], [right, wrong, broken, unprepared], ["gemm"], Roofline(1e9, {}), QUICK, CPU
    )
    by_name = {one.provider: one for one in found}
    assert by_name["right"].us > 0
    assert by_name["right"].error < 1e-5
    assert by_name["wrong"].us is None
    assert by_name["wrong"].reason == "wrong output: relative error 0.01, at most 0.005 is right"
    assert by_name["broken"].us is by_name["unprepared"].us is None
    assert by_name["broken"].reason == by_name["unprepared"].reason == "RuntimeError: M must be greater than 16"
    notes = tables.reasons(found)
    assert "broken, gemm: RuntimeError: M must be greater than 16 (M = 3, 32 x 64)" in notes


def test_rates_and_share_of_a_measurement() -> None:
    provider = float_provider("fp32", torch.float32)
    (found,) = measure_shape(WeightShape("custom", 32, 64), [3], [provider], ["gemm"], Roofline(1e9, {}), QUICK, CPU)
    seconds = found[0].us / 1e6
    moved = 4 * (3 * 64 + 32 * 64 + 3 * 32)
    assert found[0].tops == pytest.approx(2 * 3 * 32 * 64 / seconds / 1e12)
    assert found[0].tb_per_s == pytest.approx(moved / seconds / 1e12)
    assert found[0].share == pytest.approx(moved / 1e9 / seconds)


def test_a_missing_or_broken_peer_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> Provider:
        raise ImportError("libcudart.so.13: no such file")

    monkeypatch.setattr(peers, "PEERS", {"absent": ("no_such_package", breaks), "broken": ("json", breaks)})
    providers, lines = peers.installed_peers()
    assert providers == []
    assert lines == [
        "absent: no_such_package is not installed, so it is left out",
        "broken: json can't be used here, so it is left out (ImportError: libcudart.so.13: no such file)",
    ]
    assert peers.installed_peers({"absent"})[1] == lines[:1]


def test_markdown_of_a_run() -> None:
    run = run_of(
        measured("qgemm", 1, 8.0, tops=4.2, tb_per_s=2.1, share=0.5),
        measured("bf16", 1, 16.0),
        measured("fp8", 1, None, reason="RuntimeError: no"),
        measured("qgemm", 1, 32.0, N=28672, tops=7.3, tb_per_s=3.67, share=0.9),
        measured("bf16", 1, 48.0, N=28672),
        measured("qgemm", 1, 10.0, level="layer"),
        measured("bf16", 1, 16.0, level="layer"),
        checks=(ConfigCheck(8, 8, 1, "GemmConfig(block_m=16)", 11.0, "GemmConfig(block_m=32)", 10.0),),
    )
    run.quantizations = [Quantization(64, 4096, 2.04, 3.214, 0.751)]
    run.host_us = {"qgemm": {"1": 20.0, "16": 8.0}, "bf16": {"1": 16.0, "16": 16.0}, "other": {"16": 9.0}}
    lines = tables.report(run, markdown=True).splitlines()
    assert "## Times as fast as others over 2 weight shapes of Llama 3: geometric mean (minimum)" in lines
    assert "| M | bf16, gemm | bf16, layer |" in lines
    assert "| 1 | 1.73 (1.50) | 1.60 (1.60) |" in lines
    assert "| N x K | M | qgemm | bf16 | fp8 | qgemm TOPS | TB/s | of the limit |" in lines
    assert "| 4096 x 4096 | 1 | 8.0 | 16.0 | - | 4.2 | 2.10 | 50% |" in lines
    assert "- Highest rate: 7.3 TOPS (M = 1, 28672 x 4096)." in lines
    assert any(line.startswith("- Weights of 100 MB and more, M up to 16: 3.67 TB/s") for line in lines)
    assert "- fp8, gemm: RuntimeError: no (M = 1, 4096 x 4096)" in lines
    assert "| rows x columns | us | TB/s | of a copy's |" in lines
    assert "| 64 x 4096 | 2.0 | 3.21 | 75% |" in lines
    assert "| layer | M = 1, us | of bf16's | M = 16, us | of bf16's |" in lines
    assert "| qgemm | 20.0 | 1.25 | 8.0 | 0.50 |" in lines
    assert "| other | - | - | 9.0 | 0.56 |" in lines
    assert "| 8 x 8 | 1 | 11.0 | 10.0 | 1.100 | block_m=16 | block_m=32 |" in lines
    assert "Chosen / fastest over 1 products: 1.100 in the geometric mean, 1.100 at worst (M = 1, 8 x 8)." in lines


def test_tables_without_qgemm() -> None:
    lines = tables.report(run_of(measured("bf16", 1, 16.0)), markdown=True).splitlines()
    assert "| N x K | M | bf16 |" in lines
    assert "| 4096 x 4096 | 1 | 16.0 |" in lines
    assert not any("Times as fast" in line for line in lines)


def test_columns_of_a_table_line_up() -> None:
    assert tables.render((["a", "long"], [["123", "4"]]), markdown=False) == "  a  long\n123     4"


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    run = run_of(measured("qgemm", 1, 8.0), checks=(ConfigCheck(8, 8, 1, "a", 11.0, "b", 10.0),))
    run.quantizations = [Quantization(64, 4096, 2.0, 3.0, 0.75)]
    run.save(tmp_path / "deep" / "run.json")
    assert Run.load(tmp_path / "deep" / "run.json") == run


def test_a_part_of_a_saved_run(tmp_path: Path) -> None:
    entries = [
        measured(provider, M, 8.0, level=level, N=N)
        for provider in ("qgemm", "bf16", "fp8")
        for M in (1, 2)
        for level in ("gemm", "layer")
        for N in (4096, 6144)
    ]
    run = run_of(*entries)
    run.host_us = {"qgemm": {"1": 1.0}}
    run.quantizations = [Quantization(M, 4096, 2.0, 3.0, 0.75) for M in (1, 2)]
    run.save(tmp_path / "run.json")
    options = ["--m", "2", "--level", "gemm", "--shape", "6144x4096", "--provider", "qgemm", "--provider", "bf16"]
    part = main(["--load", str(tmp_path / "run.json"), *options])
    assert {(one.provider, one.level, one.N, one.M) for one in part.measurements} == {
        ("qgemm", "gemm", 6144, 2),
        ("bf16", "gemm", 6144, 2),
    }
    assert part.host_us == {}
    assert part.quantizations == []
    options = ["--m", "2", "--level", "quantize", "--shape", "6144x4096"]
    assert [one.M for one in main(["--load", str(tmp_path / "run.json"), *options]).quantizations] == [2]
    assert main(["--load", str(tmp_path / "run.json")]) == run


def plotted() -> Run:
    return run_of(
        *(
            measured(name, M, us * M, level=level, N=N, tops=1.0 / us, share=0.5)
            for level in ("gemm", "layer")
            for N in (4096, 28672)
            for M in (1, 16, 256)
            for name, us in (("qgemm", 8.0 + N / M), ("bf16", 16.0 + N))
        )
    )


@pytest.mark.slow
def test_the_plot_of_peers_is_drawn_from_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    axes = "matplotlib.axes.Axes"
    monkeypatch.setattr(f"{axes}.plot", lambda self, x, y, *args, label, **options: drawn.update({label: (x, y)}))
    monkeypatch.setattr(f"{axes}.legend", lambda *args, **options: None)
    assert plots.draw_peers(Path(__file__).parents[1] / "docs/benchmarks.md", tmp_path / "peers.png").exists()
    assert drawn["qgemm int8, 8 shapes"] == (
        [1, 16, 64, 128, 256, 1024, 4096],
        [1.96, 1.88, 1.78, 1.79, 1.84, 1.98, 2.05],
    )
    assert drawn["torchao int8"] == ([256, 4096], [0.66, 0.84])  # it fails at other Ms
    assert drawn["qgemm int8"] == ([1, 16, 256, 4096], [1.91, 1.95, 1.45, 1.55])
    assert len(drawn) == 6


@pytest.mark.slow
def test_plots_are_drawn(tmp_path: Path) -> None:
    paths = plots.draw(plotted(), tmp_path)
    assert [path.name for path in paths] == ["speedup.png", "roofline-gemm.png", "roofline-layer.png"]
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000
    run = plotted()
    run.measurements = [one for one in run.measurements if one.provider != "bf16"]
    assert [path.name for path in plots.draw(run, tmp_path)] == ["roofline-gemm.png", "roofline-layer.png"]


def test_without_matplotlib_there_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert plots.draw(run_of(measured("qgemm", 1, 8.0)), tmp_path / "plots") == []
    assert capsys.readouterr().out == 'no plots: matplotlib is not installed (pip install ".[bench]")\n'
    assert not (tmp_path / "plots").exists()


@pytest.mark.slow
def test_a_plot_and_a_table_of_each_shape(tmp_path: Path) -> None:
    run = plotted()
    run.measurements = [one for one in run.measurements if (one.provider, one.N, one.M) != ("bf16", 4096, 16)]
    page = plots.report(run, tmp_path / "shapes")
    assert page == tmp_path / "shapes" / "results.html"
    names = [f"{level}-{N}x{K}" for level, N, K in dict.fromkeys((one.level, one.N, one.K) for one in run.measurements)]
    assert len(names) == 4
    assert all(f"{name}.png" in page.read_text() for name in names)
    assert all((tmp_path / "shapes" / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)
    with (tmp_path / "shapes" / f"{names[0]}.csv").open(newline="") as file:
        table = {float(row["M"]): row for row in csv.DictReader(file)}
    ours = {one.M: one.tops for one in run.measurements if (one.provider, one.level, one.N) == ("qgemm", "gemm", 4096)}
    assert list(table) == [1, 16, 256]
    for M, tops in ours.items():
        assert tops is not None
        assert float(table[M]["qgemm (TOPS)"]) == pytest.approx(tops, abs=1e-6)
    assert [table[M]["bf16 (TOPS)"] == "" for M in table] == [False, True, False]
    # Twice the rows make twice the operations for hardly more bytes, as long as those are the limit.
    assert float(table[16]["limit, int8 (TOPS)"]) == pytest.approx(16 * float(table[1]["limit, int8 (TOPS)"]), rel=0.05)


def test_without_pandas_there_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None if name == "pandas" else name)
    assert plots.report(plotted(), tmp_path / "shapes") is None
    assert capsys.readouterr().out == 'no plots of single shapes: pandas not installed (pip install ".[bench]")\n'
    assert not (tmp_path / "shapes").exists()


def test_quantization_is_timed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_quantization(3, 100, 1e9, QUICK, CPU)
    assert (found.M, found.K) == (3, 100)
    # float32 read, int8 and a scale a row written.
    assert found.tb_per_s == pytest.approx(3 * (4 * 100 + 100 + 4) / found.us / 1e6)
    assert found.share == pytest.approx(found.tb_per_s * 1e12 / 1e9)
    original = measure.quantize_rows
    monkeypatch.setattr(measure, "quantize_rows", lambda x: (original(x)[0], original(x)[1] * 1.01))
    with pytest.raises(ValueError, match="wrong output of quantize_rows for 3 x 100"):
        measure_quantization(3, 100, 1e9, QUICK, CPU)


def test_config_check_refuses_wrong_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(wrong: bool) -> None:
        def scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, **options: object) -> Tensor:
            assert options.keys() == {"constant_b", "config"}
            out = (a.float() @ b.float()) * a_scale[:, None] * b_scale
            return out * 1.1 if wrong else out

        monkeypatch.setattr(configs, "scaled_mm", scaled)

    shape = WeightShape("custom", 64, 256)
    weights = configs.rotated_weights(shape, CPU)[:2]
    make(wrong=False)
    found = configs.check_config(shape, 5, weights, QUICK, CPU)
    assert (found.N, found.K, found.M) == (64, 256, 5)
    assert found.ratio >= 1
    assert found.chosen.startswith("GemmConfig(")
    make(wrong=True)
    with pytest.raises(ValueError, match="wrong outputs for M = 5, 64 x 256"):
        configs.check_config(shape, 5, weights, QUICK, CPU)


@pytest.mark.slow
def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    """As a user starts it. On a GPU this measures the GPU's providers on the same tiny shapes."""
    root = Path(__file__).parent.parent
    options = ["--shape", "48x64", "--m", "1", "--m", "17", "--quick", "--commit", "abc"]
    for level in ("gemm", "layer", "quantize"):
        options += ["--level", level]
    for name in ("qgemm", "bf16", "int_mm"):
        options += ["--provider", name]
    files = ["--json", str(tmp_path / "run.json"), "--markdown", str(tmp_path / "run.md")]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options, *files],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "2/2" in result.stderr  # progress
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["environment"]["commit"] == "abc"
    assert saved["environment"]["versions"]["torch"]
    timed = {(one["provider"], one["level"], one["M"]) for one in saved["measurements"] if one["us"]}
    assert {("qgemm", level, M) for level in ("gemm", "layer") for M in (1, 17)} <= timed
    assert ("bf16", "gemm", 17) in timed
    assert [(one["M"], one["K"]) for one in saved["quantizations"]] == [(1, 64), (17, 64)]
    assert all(one["us"] > 0 and one["share"] > 0 for one in saved["quantizations"])
    assert "| 17 x 64 |" in (tmp_path / "run.md").read_text()
    assert "| 48 x 64 | 1 |" in (tmp_path / "run.md").read_text()
    # The saved run gives the same tables without measuring.
    again = main(["--load", str(tmp_path / "run.json"), "--markdown", str(tmp_path / "again.md")])
    assert len(again.measurements) == len(saved["measurements"])
    assert (tmp_path / "again.md").read_text() == (tmp_path / "run.md").read_text()
