"""``qgemm quantize``: the options reach ``quantize_checkpoint``, the report comes back."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import qgemm
from cli.command import run, run_failing, run_json
from qgemm.calibration import Calibration, MinMax
from qgemm_cli.commands.quantize import parse_schemes


def test_the_checkpoint_loads_and_the_report_is_right(float_folder: Path, tmp_path: Path) -> None:
    (float_folder / "tokenizer.json").write_text("{}")
    found = run_json("quantize", float_folder, tmp_path / "out", "--max-shard-size", "12KB")
    model = qgemm.load_quantized(tmp_path / "out")
    report = qgemm.report(model)
    assert found["layers"] == report.to_dict()["records"]
    assert (found["quantized"], found["kept"]) == (len(report.quantized), len(report.kept)) == (14, 1)
    assert found["coverage"] == report.coverage
    assert found["largest_error"] == report.largest_error
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert run_json("inspect", tmp_path / "out")["problems"] == []


def test_skip_takes_names_globs_and_regular_expressions(float_folder: Path, tmp_path: Path) -> None:
    skips = ["--skip", "model.layers.0.mlp.up_proj", "--skip", "*.o_proj", "--skip", r"re:layers\.1\.self_attn\.[qk]"]
    run("quantize", float_folder, tmp_path / "out", *skips)
    kept = {record.name for record in qgemm.report(qgemm.load_quantized(tmp_path / "out")).kept}
    assert kept == {
        "model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
        "lm_head",
    }


def test_static_scales_come_from_a_file(float_folder: Path, tmp_path: Path) -> None:
    names = [layer["name"] for layer in run_json("inspect", float_folder)["layers"] if layer["kind"] == "linear"]
    scales = {name: 0.01 * (index + 1) for index, name in enumerate(names)}
    (tmp_path / "scales.json").write_text(json.dumps(scales))
    arguments = ("--scheme", "int8-static", "--input-scales", tmp_path / "scales.json")
    run("quantize", float_folder, tmp_path / "out", *arguments)
    model = qgemm.load_quantized(tmp_path / "out")
    found = {name: m.input_scale for name, m in model.named_modules() if isinstance(m, qgemm.QuantLinear)}
    assert found == {name: torch.tensor(scale) for name, scale in scales.items()}


def test_a_calibration_says_what_it_does_not_go_with(float_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "statistics.safetensors"
    Calibration(MinMax()).save(path)
    failing = partial(run_failing, "quantize", float_folder, tmp_path / "out", "--statistics", path)
    static = ("--scheme", "int8-static")
    assert "--statistics and --text both give the scales: pass one" in failing(*static, "--text", path)
    assert "--statistics and --recipe both give the scales: pass one" in failing(*static, "--recipe", "gptq")
    assert "--input-scales and --statistics both give" in failing(*static, "--input-scales", path)
    assert "pass --text FILE instead of --statistics" in failing("--scheme", "int8-static-hadamard")
    assert "--statistics is for static schemes: pass one as --scheme, or leave it out" in failing()
    (tmp_path / "wanted.yaml").write_text("recipe: [mse-weights]\nscheme: int8-static\n")
    assert "pass --text FILE instead of --statistics" in failing("--config", tmp_path / "wanted.yaml")
    path.write_bytes(b"no statistics")
    assert "statistics.safetensors" in failing(*static)


def test_every_option_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def record(*arguments: Any, **options: Any) -> qgemm.QuantReport:
        calls.append((arguments, options))
        return qgemm.QuantReport(())

    monkeypatch.setattr(qgemm, "quantize_checkpoint", record)
    options = {"scheme": "int8", "device": "meta", "max-shard-size": "7GB", "drop": "a.*", "skip": "b", "include": "c"}
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    run("quantize", tmp_path, tmp_path / "out", *flags, "--no-resume", "--no-progress", "--workers", 3)
    run("quantize", tmp_path, tmp_path / "out")
    (given, chosen), (_, default) = calls
    assert given == (tmp_path, tmp_path / "out", "int8")
    assert (chosen["skip"], chosen["include"]) == (["b"], ["c"])
    assert chosen["drop"] == ["a.*"]
    assert (chosen["device"], chosen["max_shard_size"]) == ("meta", "7GB")
    assert (chosen["resume"], chosen["progress"]) == (False, False)
    assert (default["resume"], default["progress"], default["skip"]) == (True, None, [])
    assert (chosen["workers"], default["workers"]) == (3, 1)


def test_a_config_says_what_is_wanted(float_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "wanted.yaml"
    path.write_text('scheme: [["*.mlp.*", int4], ["re:q_proj$", null], ["*", int8]]\nskip: ["*.o_proj"]\n')
    found = run_json("quantize", float_folder, tmp_path / "out", "--config", path)
    options = ("--scheme", "*.mlp.*=int4", "--scheme", "re:q_proj$=float", "--scheme", "*=int8", "--skip", "*.o_proj")
    same = run_json("quantize", float_folder, tmp_path / "same", *options)
    assert {**found, "destination": ""} == {**same, "destination": ""}
    path.write_text("recipe: [mse-weights]\nscheme: int4\n")
    assert run_json("quantize", float_folder, tmp_path / "recipe", "--config", path)["windows"] == 0
    failing = partial(run_failing, "quantize", float_folder, tmp_path / "none", "--config", path)
    assert "--config replaces --scheme" in failing("--skip", "a")
    path.write_text("device: cpu\n")
    assert "the folder to resume from are options of the command" in failing()
    path.write_text("budget: {kl: 0.1}\nscheme: [int8, int4]\n")
    assert "budget needs a text to run the model on: pass --text FILE" in failing()


def test_the_table_has_a_row_for_a_kind_of_layer(float_folder: Path, tmp_path: Path) -> None:
    shown = run("quantize", float_folder, tmp_path / "out", "--no-progress").stdout
    assert "model.layers.{0..1}.mlp.up_proj" in shown
    assert "float: output head" in shown
    assert "14 of 15 layers quantized" in shown


def test_the_size_of_files_may_be_a_number(float_folder: Path, tmp_path: Path) -> None:
    run("quantize", float_folder, tmp_path / "out", "--max-shard-size", "12000")
    run("convert", tmp_path / "out", tmp_path / "other", "--to", "compressed-tensors", "--max-shard-size", "12000")
    for name in ("out", "other"):
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1


def test_what_cannot_be_done_is_one_sentence(float_folder: Path, int8_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "qgemm: --scheme is 'int3'" in run_failing("quantize", float_folder, out, "--scheme", "int3")
    assert "did you mean" in run_failing("quantize", float_folder, out, "--skip", "model.layers.0.mlp.up_prj")
    assert "qgemm: --skip: 're:(' isn't a valid regular" in run_failing("quantize", float_folder, out, "--skip", "re:(")
    assert "qgemm: --max-shard-size is 'big'" in run_failing("quantize", float_folder, out, "--max-shard-size", "big")
    assert 'qgemm: --device is "tpu"' in run_failing("quantize", float_folder, out, "--device", "tpu")
    assert "pass --text FILE, or --statistics FILE, or --input-scales FILE" in run_failing(
        "quantize", float_folder, out, "--scheme", "int8-static"
    )
    assert "--length is for a text: pass --text FILE" in run_failing("quantize", float_folder, out, "--length", 8)
    assert "is quantized already" in run_failing("quantize", int8_folder, out)
    assert "is not a folder" in run_failing("quantize", tmp_path / "nowhere", out)
    assert not out.exists()


def test_schemes_by_pattern(float_folder: Path, tmp_path: Path) -> None:
    schemes = ["--scheme", "re:mlp=int4", "--scheme", "model.layers.1=float", "--scheme", "*=int8"]
    found = run_json("quantize", float_folder, tmp_path / "out", *schemes)
    assert found["scheme"] == {"re:mlp": "int4", "model.layers.1": None, "*": "int8"}
    actions = {record.name: record.action for record in qgemm.report(qgemm.load_quantized(tmp_path / "out")).records}
    assert actions["model.layers.1.mlp.up_proj"] == "int4"
    assert actions["model.layers.1.self_attn.q_proj"] == "float"
    assert actions["model.layers.0.self_attn.q_proj"] == "int8"
    # It is tied to the embedding, and what was asked for says so.
    said = run_failing("quantize", float_folder, tmp_path / "again", "--include", "lm_head")
    assert "it shares its weight with model.embed_tokens" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["int4", "*=int8"], "--scheme int4 is one of several, each of which must be PATTERN=SCHEME"),
        (["*=int4", "*=int8"], r"--scheme \*=int8 has that pattern twice"),
        (["int4", "int8"], "is one of several"),
    ],
)
def test_schemes_that_are_none(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_schemes(given)
