"""``from_pretrained`` of files that don't belong together, or that change while it reads."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.rewriting import edited, save_of, set_save
from checkpoint.savers import savers
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import qgemm
from integrations.folders import assert_same, load, quantized_names
from qgemm import CheckpointError
from qgemm.integrations.transformers import reading
from qgemm.numerics.formats import INT8

ANOTHER = "0123456789abcdef"


def filled(value: int) -> Any:
    """A tiny Llama all of whose weights, biases and scales are ``value``, or a multiple."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, max_position_embeddings=16, **sizes))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    model.generation_config.max_new_tokens = value
    return qgemm.quantize_model(model)


def values_of(model: Any) -> set[int]:
    """What the model was filled with; several, if it is a mixture."""
    found = {
        round(float(value))
        for name, p in model.named_parameters()
        if "_proj" not in name
        for value in p.detach().flatten()
    }
    for name, parameter in model.named_parameters():
        if name.endswith("weight_scale"):
            found |= {round(INT8.steps * float(value)) for value in parameter}
    return {*found, model.generation_config.max_new_tokens}


def save_filled(folder: Path, value: int) -> None:
    qgemm.save_quantized(filled(value), folder, max_shard_size=700, overwrite=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_filled(tmp_path / "int8", 3)
    assert len(list((tmp_path / "int8").glob("model-*.safetensors"))) > 2
    return tmp_path / "int8"


@pytest.mark.parametrize("other", [ANOTHER, None], ids=["another", "none"])
@pytest.mark.parametrize("name", ["config.json", "qgemm_report.json", "model-00002"])
def test_files_of_two_saves(name: str, other: str | None, folder: Path) -> None:
    assert values_of(load(folder)) == {3}
    set_save(next(folder.glob(f"{name}*")), other)
    said = "" if other else "of no save.*"
    with pytest.raises(CheckpointError, match=f"{said}files of two checkpoints"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "model-00002"])
def test_files_of_two_saves_of_transformers(name: str, folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=700)
    again = load(tmp_path / "theirs")
    assert_same(again, model)
    assert qgemm.report(again) == qgemm.report(model)
    assert save_of(tmp_path / "theirs") != save_of(folder)
    set_save(next((tmp_path / "theirs").glob(f"{name}*")), ANOTHER)
    for loader in (load, qgemm.load_quantized):
        with pytest.raises(CheckpointError, match="files of two checkpoints"):
            loader(tmp_path / "theirs")


def test_an_interrupted_save_of_transformers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It writes into place: the config first, then file by file.
    load(folder).save_pretrained(tmp_path / "theirs", max_shard_size=700)
    written = []

    def stop(*args: Any, **kwargs: Any) -> None:
        written.append(args)
        if len(written) == 2:
            raise KeyboardInterrupt
        save_file(*args, **kwargs)

    from transformers import modeling_utils

    save_file = modeling_utils.safe_save_file
    monkeypatch.setattr(modeling_utils, "safe_save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        filled(4).save_pretrained(tmp_path / "theirs", max_shard_size=700)
    for loader in (load, qgemm.load_quantized):
        with pytest.raises(CheckpointError, match="files of two checkpoints"):
            loader(tmp_path / "theirs")


def test_a_report_that_is_not_there(folder: Path) -> None:
    (folder / "qgemm_report.json").unlink()
    with pytest.warns(UserWarning, match=r"has no qgemm_report\.json: the model is loaded"):
        model = load(folder)
    assert len(qgemm.report(model).quantized) == 14


def test_the_name_of_the_files_goes_no_further(folder: Path, tmp_path: Path) -> None:
    save_filled(folder, 4)
    named = json.loads((folder / "config.json").read_text())["transformers_weights"]
    assert named == f"model-{save_of(folder)}.safetensors.index.json"
    for model in (load(folder), qgemm.load_quantized(folder)):
        assert values_of(model) == {4}
        assert not hasattr(model.config, "transformers_weights")
        # Nor does the id: what is saved next has one of its own.
        model.save_pretrained(tmp_path / "theirs")
        qgemm.save_quantized(model, tmp_path / "ours", overwrite=True)
        for again in (tmp_path / "theirs", tmp_path / "ours"):
            assert values_of(load(again)) == {4}
            assert save_of(again) != save_of(folder)


def test_the_config_alone_may_be_written_again(folder: Path) -> None:
    for loader in (load, qgemm.load_quantized):
        model = loader(folder)
        model.config.rms_norm_eps = 1e-3
        model.config.save_pretrained(folder)
        assert load(folder).config.rms_norm_eps == qgemm.load_quantized(folder).config.rms_norm_eps == 1e-3


def test_version_1_of_the_format(folder: Path) -> None:
    path = folder / "config.json"
    report = json.loads((folder / "qgemm_report.json").read_text())["report"]
    layers = dict.fromkeys(quantized_names(load(folder)), "int8")
    with edited(path) as values:
        del values["fusion_config"]
        values["quantization_config"] |= {"format_version": 1, "layers": layers, "report": report}
    for each in (path, *folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        set_save(each, None)
    for model in (load(folder), qgemm.load_quantized(folder)):
        assert values_of(model) == {3}
        assert qgemm.report(model).to_dict() == report


def test_a_save_while_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = filled(4)

    def open_and_save(*args: Any) -> Any:
        opened = open_files(*args)
        with torch.device("cpu"):
            qgemm.save_quantized(other, folder, max_shard_size=700, overwrite=True)
        return opened

    open_files = reading.open_files
    monkeypatch.setattr(reading, "open_files", open_and_save)
    with pytest.raises((CheckpointError, OSError)):
        load(folder)
    monkeypatch.undo()
    assert values_of(load(folder)) == {4}


def test_a_generation_config_that_is_still_to_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The save was killed right after its config.json came into place.
    path = folder / "generation_config.json"
    pending = folder / f"generation_config-{save_of(folder)}.json"
    pending.write_text(json.dumps({**json.loads(path.read_text()), "max_new_tokens": 7}))
    assert load(folder).generation_config.max_new_tokens == 7
    given = GenerationConfig(max_new_tokens=9)
    assert load(folder, generation_config=given).generation_config.max_new_tokens == 9
    path.unlink()
    assert load(folder).generation_config.max_new_tokens == 7

    def open_and_finish(*given: Any) -> Any:
        found = open_files(*given)
        pending.rename(path)
        return found

    open_files = reading.open_files
    monkeypatch.setattr(reading, "open_files", open_and_finish)
    assert load(folder).generation_config.max_new_tokens == 7


@pytest.mark.slow
def test_loads_while_another_process_saves(folder: Path) -> None:
    found: Counter[Any] = Counter()
    with savers(folder, save_filled, 1):
        limit = time.monotonic() + 3
        while time.monotonic() < limit:
            try:
                found[tuple(values_of(load(folder)))] += 1
            except (ValueError, OSError, RuntimeError) as error:  # what is said of a file that is gone
                found[type(error)] += 1
    loaded = [values for values in found if isinstance(values, tuple)]
    assert all(len(values) == 1 for values in loaded), found
    assert loaded
