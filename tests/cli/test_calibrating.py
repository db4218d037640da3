"""``qgemm quantize --recipe --text``: the bits of ``quantize_model`` on the windows of a text, and what is refused."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES
from torch import Tensor, nn

import qgemm
from cli.command import run, run_failing, run_json
from cli.test_compare import TEXT, write_tokenizer
from qgemm.calibration import GPTQ, Block, Recipe, SmoothQuant
from qgemm_cli.calibrating import Windows, cut_windows

STATIC = ("--scheme", "int8-static")
APPLY = GPTQ.apply
FEW = ("--samples", 3, "--length", 8)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def source(float_folder: Path) -> Path:
    write_tokenizer(float_folder)
    return float_folder


def windows_of(text: str, count: int, length: int) -> list[dict[str, Tensor]]:
    ids = [ord(letter) - ord("a") for letter in text.split()]
    places = [place * (len(ids) - length) // (count - 1) for place in range(count)]
    return [{"input_ids": torch.tensor([ids[place : place + length]])} for place in places]


def same_bits(folder: Path, model: nn.Module) -> bool:
    got, wanted = qgemm.load_quantized(folder).state_dict(), model.state_dict()
    return list(got) == list(wanted) and all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["names", "file", "no recipe"])
def test_the_bits_are_those_of_quantize_model(kind: str, source: Path, text: Path, tmp_path: Path) -> None:
    recipe = Recipe([] if kind == "no recipe" else [SmoothQuant(), GPTQ()])
    recipe.save(tmp_path / "recipe.yaml")
    options = {"names": ("--recipe", "smoothquant, gptq"), "file": ("--recipe", tmp_path / "recipe.yaml")}
    skip = ("--skip", "*.o_proj", "--max-shard-size", "12KB")
    found = run_json("quantize", source, tmp_path / "out", *STATIC, *options.get(kind, ()), "--text", text, *FEW, *skip)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    batches = windows_of(TEXT, 3, 8)
    qgemm.quantize_model(model, "int8-static", calibration=batches, recipe=recipe, skip="*.o_proj", progress=False)
    assert same_bits(tmp_path / "out", model)
    report = qgemm.report(qgemm.load_quantized(tmp_path / "out"))
    assert report.records == qgemm.report(model).records
    assert report.recipe == found["recipe"] == (None if kind == "no recipe" else recipe.to_dict())
    assert (found["windows"], found["quantized"]) == (3, 12)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"float", "out", "text.txt", "recipe.yaml"}
    assert run_json("inspect", tmp_path / "out")["problems"] == []


def test_methods_without_data_need_no_text(float_folder: Path, tmp_path: Path) -> None:
    found = run_json("quantize", float_folder, tmp_path / "out", "--scheme", "int4", "--recipe", "mse-weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(float_folder)
    qgemm.quantize_model(model, "int4", recipe=[qgemm.calibration.MSEWeights()])
    assert same_bits(tmp_path / "out", model)
    assert found["windows"] == 0


def killed_at(block: str, seen: list[str]) -> Callable[..., None]:
    def stop(self: GPTQ, work: Block) -> None:
        seen.append(work.name)
        if work.name == block:
            raise KeyboardInterrupt
        APPLY(self, work)

    return stop


@pytest.mark.slow
def test_the_same_command_goes_on(source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("quantize", source, tmp_path / "out", *STATIC, "--recipe", "gptq", "--text", text, *FEW)
    seen: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(GPTQ, "apply", killed_at("model.layers.1", seen))
        said = run(*command, exit_code=130).stderr
        assert "out.calibration; the same command resumes from there" in said
        assert not (tmp_path / "out").exists()
        shutil.copytree(tmp_path / "out.calibration", tmp_path / "afresh.calibration")
        patch.setattr(GPTQ, "apply", killed_at("", seen))
        run(*command)
        assert seen == ["model.layers.0", "model.layers.1", "model.layers.1"]
        assert "holds a run with another recipe" in run_failing(
            *(part if part != tmp_path / "out" else tmp_path / "afresh" for part in command[:6]),
            *("smoothquant", "--text", text, *FEW),
        )
        run(*(part if part != tmp_path / "out" else tmp_path / "afresh" for part in command), "--no-resume")
        assert seen[3:] == ["model.layers.0", "model.layers.1"]
    for name in ("out", "afresh"):
        model = transformers.AutoModelForCausalLM.from_pretrained(source)
        qgemm.quantize_model(model, "int8-static", calibration=windows_of(TEXT, 3, 8), recipe=[GPTQ()])
        assert same_bits(tmp_path / name, model)
        assert not (tmp_path / f"{name}.calibration").exists()


@pytest.mark.parametrize("options", [("--recipe", "mse-weights"), (*STATIC, *FEW)])
def test_a_folder_of_the_user_s_is_left_alone(
    options: tuple[object, ...], source: Path, text: Path, tmp_path: Path
) -> None:
    own = tmp_path / "out.calibration"
    own.mkdir()
    (own / "checkpoint").mkdir()
    (own / "checkpoint" / "mine.txt").write_text("mine")
    command = ("quantize", source, tmp_path / "out", *options, *(("--text", text) if options[0] == "--scheme" else ()))
    assert "out.calibration exists, and isn't a folder that qgemm made: move it" in run_failing(*command)
    assert (own / "checkpoint" / "mine.txt").read_text() == "mine"
    shutil.rmtree(own)
    run(*command)
    assert not own.exists()


@pytest.mark.slow
def test_a_full_disk_after_the_work_loses_none_of_it(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(GPTQ, "apply", killed_at("", seen))
    command = ("quantize", source, tmp_path / "out", *STATIC, "--recipe", "gptq", "--text", text, *FEW)
    with monkeypatch.context() as patch:
        patch.setattr(qgemm, "save_quantized", full_disk)
        said = run_failing(*command)
    assert "here: No space left on device. What is done isn't lost: finished blocks are kept in " in said
    assert "out.calibration; the same command resumes from there" in said
    with monkeypatch.context() as patch:
        patch.setattr("qgemm.calibration.resume.write_safetensors", full_disk_of_no_name)
        other = ("quantize", source, tmp_path / "other", *command[3:])
        assert run_failing(*other) == f"qgemm: {tmp_path / 'other.calibration'}: No space left on device\n"
        del seen[2:]
    run(*command)
    assert seen == ["model.layers.0", "model.layers.1"]
    with monkeypatch.context() as patch:
        patch.setattr(qgemm, "save_quantized", full_disk)
        without = ("quantize", source, tmp_path / "other", "--recipe", "mse-weights")
        assert run_failing(*without) == "qgemm: here: No space left on device\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "out", "text.txt"]


def full_disk_of_no_name(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_disk(*_: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "here")


def test_a_link_as_destination_is_refused_before_the_work(source: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "to-empty").symlink_to(tmp_path / "empty")
    (tmp_path / "to-nothing").symlink_to(tmp_path / "nothing")
    for name, problem in (("to-empty", "exists already"), ("to-nothing", "is a link to what isn't there")):
        for options in ((), ("--recipe", "gptq", "--text", text, *FEW)):
            assert problem in run_failing("quantize", source, tmp_path / name, *options)
    assert not list(tmp_path.glob("*.calibration"))


class Tokenizer:
    """A token for each letter, framed."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = False) -> dict[str, list[int]]:
        ids = [ord(letter) for letter in text]
        return {"input_ids": [1, 2, *ids, 3] if add_special_tokens else ids}


@pytest.mark.parametrize(("samples", "length", "count"), [(4, 16, 4), (1, 16, 1), (9, 16, 7), (4, 1000, 1)])
def test_windows_are_spread_evenly_and_framed(samples: int, length: int, count: int, tmp_path: Path) -> None:
    letters = "".join(chr(ord("A") + place) for place in range(100))
    (tmp_path / "text").write_text(letters, encoding="utf-8")
    model: Any = FAMILIES["llama"]().model
    model.config.max_position_embeddings = 64  # no window is longer
    windows = Windows(tmp_path / "text", samples, length)
    with pytest.warns(match="make . windows") if count < samples else nullcontext():
        found = cut_windows(model, Tokenizer(), windows)
    assert len(found) == count
    inside = min(length, 64) - 3
    places = []
    for window in found:
        ids = window.tolist()
        assert (ids[:2], ids[-1]) == ([1, 2], 3)
        places.append(ids[2] - ord("A"))
        assert ids[2:-1] == list(range(ids[2], ids[2] + inside))
    assert places[0] == 0
    assert count == 1 or places[-1] == 100 - inside
    steps = {after - before for before, after in pairwise(places)}
    assert not steps or (max(steps) - min(steps) <= 1 and min(steps) >= inside)


def test_what_cannot_be_done_is_one_sentence(source: Path, int8_folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def failing(*options: object, folder: Path = source) -> str:
        return run_failing("quantize", folder, out, *options)

    recipe = ("--recipe", "gptq")
    with_text = (*recipe, "--text", text, *FEW)
    assert "the method gptq needs a text to run the model on: pass --text FILE" in failing(*recipe)
    assert "the scheme 'int8-static' needs a text" in failing(*STATIC, "--recipe", "mse-weights")
    assert "the scheme 'int8-static' needs a text to run the model on: pass --text FILE" in failing(*STATIC)
    assert "pass --recipe too" in failing("--text", text)
    assert "--recipe gtpq: there is no method 'gtpq'; did you mean 'gptq'?" in failing("--recipe", "gtpq")
    assert "smoothquant after gptq" in failing("--recipe", "gptq,smoothquant")
    assert "--input-scales and --text both" in failing(*with_text, "--input-scales", text)
    assert "--drop is for quantizing from files to files" in failing(*with_text, "--drop", "a")
    assert "--workers is for quantizing from files to files" in failing(*with_text, "--workers", 2)
    (tmp_path / "short.txt").write_text("a b c")
    short = (*recipe, "--text", tmp_path / "short.txt", "--length", 4)
    assert "short.txt has 3 tokens, and a window has 4: give a longer text, or --length" in failing(*short)
    (tmp_path / "latin.txt").write_bytes("Käse".encode("latin-1"))
    assert "latin.txt is no text in UTF-8: save it in UTF-8" in failing(*recipe, "--text", tmp_path / "latin.txt")
    assert "No such file" in failing(*recipe, "--text", tmp_path / "nothing.txt")
    assert "is quantized already (qgemm)" in failing(*with_text, folder=int8_folder)
    assert "scheme is 'int3'" in failing(*with_text, "--scheme", "int3")
    assert "--max-shard-size is" in failing(*with_text, "--max-shard-size", "big")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").unlink()
    assert "has no tokenizer: save the tokenizer there" in failing(*with_text)
    write_tokenizer(source)
    out.mkdir()
    (out / "thesis.tex").touch()
    assert "exists already: choose another destination, or remove it" in failing(*with_text)
    shutil.rmtree(out)
    example = FAMILIES["t5"]()
    example.model.save_pretrained(tmp_path / "t5")
    write_tokenizer(tmp_path / "t5")
    assert "T5ForConditionalGeneration needs more input than the text" in failing(*with_text, folder=tmp_path / "t5")
    assert not out.exists()
