"""The files of one save belong together: others are refused, and nobody reads a mixture while a save takes place."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import qgemm
from checkpoint.rewriting import edited, save_of, set_save
from checkpoint.savers import savers
from qgemm import CheckpointError, load_quantized, save_quantized
from qgemm.checkpoint import load, save
from qgemm.checkpoint.layout import retry_while_saved
from qgemm.checkpoint.safetensors_file import CHECKSUMS
from qgemm.numerics.formats import INT8

CONFIG, INDEX, REPORT = "config.json", "model.safetensors.index.json", "qgemm_report.json"


def filled(value: int) -> nn.Module:
    """A model all of whose float tensors are ``value``, and whose report says so."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return qgemm.quantize_model(model, skip="0")


def empty() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def value_of(model: nn.Module) -> int:
    """What ``filled`` was given; fails if the model is of several."""
    found = {round(float(value), 3) for value in model[0].state_dict()["weight"].flatten()}
    for layer in model:
        found |= {round(float(value), 3) for value in layer.bias.detach()}
    for layer in model[1:]:
        assert bool((layer.state_dict()["weight"] == INT8.high).all())
        found |= {round(INT8.steps * float(value), 3) for value in layer.state_dict()["weight_scale"]}
    assert len(found) == 1, f"a mixture of {found}"
    return int(found.pop())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_quantized(filled(3), tmp_path / "net", max_shard_size=300)
    assert len(list((tmp_path / "net").glob("model-*.safetensors"))) > 3
    return tmp_path / "net"


def test_every_file_has_the_id(folder: Path) -> None:
    save = save_of(folder)
    assert len(save) == 16
    assert all(save.encode() in path.read_bytes() for path in folder.iterdir())
    report = json.loads((folder / REPORT).read_text())
    assert report["report"] == qgemm.report(load_quantized(folder, model=empty)).to_dict()
    assert "records" not in (folder / CONFIG).read_text()


ANOTHER = "0123456789abcdef"
# Of indices, those that transformers writes have none; the files that they name do.
OTHERS = [(CONFIG, ANOTHER), (CONFIG, None), (INDEX, ANOTHER), (REPORT, ANOTHER), (REPORT, None)]


@pytest.mark.parametrize(("name", "other"), [*OTHERS, ("model-00002", ANOTHER), ("model-00002", None)])
def test_files_of_two_saves(name: str, other: str | None, folder: Path) -> None:
    path = next(folder.glob(f"{name}*"))
    set_save(path, save_of(folder))
    assert value_of(load_quantized(folder, model=empty)) == 3
    set_save(path, other)
    named = "model" if name == CONFIG else name
    with pytest.raises(
        CheckpointError, match=rf"{named}.* is of .*config\.json .*: these are files of two checkpoints"
    ):
        load_quantized(folder, model=empty)


def test_a_file_of_another_save_with_the_same_names(folder: Path, tmp_path: Path) -> None:
    save_quantized(filled(4), tmp_path / "other", max_shard_size=300)
    for path in folder.iterdir():
        copy = Path(shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True))
        shutil.copy(tmp_path / "other" / path.name, copy / path.name)
        with pytest.raises(CheckpointError, match="files of two checkpoints"):
            load_quantized(copy, model=empty)


def test_one_file_has_the_id_too(tmp_path: Path) -> None:
    save_quantized(filled(3), tmp_path)
    set_save(tmp_path / "model.safetensors", "0123456789abcdef")
    with pytest.raises(CheckpointError, match="files of two checkpoints"):
        load_quantized(tmp_path, model=empty)


def test_compressed_tensors_have_it_too(tmp_path: Path) -> None:
    save_quantized(filled(3), tmp_path, max_shard_size=300, format="compressed-tensors")
    assert value_of(load_quantized(tmp_path, model=empty)) == 3
    set_save(next(tmp_path.glob("model-00002*")), None)
    with pytest.raises(CheckpointError, match="files of two checkpoints"):
        load_quantized(tmp_path, model=empty)


def test_a_report_that_is_not_there(folder: Path) -> None:
    # As after a download of the weights alone.
    (folder / REPORT).unlink()
    with pytest.warns(UserWarning, match=r"has no qgemm_report\.json: the model is loaded"):
        model = load_quantized(folder, model=empty)
    assert value_of(model) == 3
    assert len(qgemm.report(model).records) == 5


@pytest.mark.parametrize(
    ("values", "problem"),
    [("fine", "report must be an object"), ({"x": 1}, "report can't be read"), (None, "report must be an object")],
)
def test_a_report_that_is_none(values: Any, problem: str, folder: Path) -> None:
    with edited(folder / REPORT) as written:
        written["report"] = values
    with pytest.raises(CheckpointError, match=rf"qgemm_report\.json: {problem}"):
        load_quantized(folder, model=empty)


@pytest.mark.slow
def test_the_config_of_many_layers_is_short(tmp_path: Path) -> None:
    blocks = nn.ModuleList(nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkvogud"}) for _ in range(80))
    model = qgemm.quantize_model(nn.ModuleDict({"layers": blocks}))
    save_quantized(model, tmp_path)
    assert len((tmp_path / CONFIG).read_text().splitlines()) < 50
    assert len(qgemm.report(load_quantized(tmp_path, model=lambda: floats(80))).records) == 560


def floats(count: int) -> nn.Module:
    blocks = nn.ModuleList(nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkvogud"}) for _ in range(count))
    return nn.ModuleDict({"layers": blocks})


def test_a_save_while_a_checkpoint_is_read_is_read_instead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, saves = load.match, []

    def match_and_save(*args: Any) -> Any:
        if len(saves) < 3:
            saves.append(save_quantized(filled(4 + len(saves)), folder, max_shard_size=300, overwrite=True))
        return original(*args)

    monkeypatch.setattr(load, "match", match_and_save)
    assert value_of(load_quantized(folder, model=empty)) == 6


def test_it_is_not_read_again_for_ever(folder: Path) -> None:
    calls = []

    def changes_and_fails() -> None:
        calls.append(set_save(folder / CONFIG, f"{len(calls):016x}"))
        raise CheckpointError("no")

    with pytest.raises(CheckpointError, match=r"^no$"):
        retry_while_saved(folder, changes_and_fails)
    assert 2 < len(calls) < 50


def test_a_file_that_was_replaced_by_one_like_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By a program that knows no ids, after its header was checked.
    original = load.match
    path = next(folder.glob("model-00002*"))

    def match_and_replace(*args: Any) -> Any:
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
        return original(*args)

    monkeypatch.setattr(load, "match", match_and_replace)
    with pytest.raises(CheckpointError, match=r"model-00002.* was replaced while the checkpoint was read"):
        load_quantized(folder, model=empty)


def test_a_generation_config_that_is_still_to_come(llama_folder: Path) -> None:
    # The process was killed right after the new config.json was in place.
    path = llama_folder / "generation_config.json"
    new = json.loads(path.read_text()) | {"max_new_tokens": 77}
    assert load_quantized(llama_folder).generation_config.max_new_tokens is None
    (llama_folder / f"generation_config-{save_of(llama_folder)}.json").write_text(json.dumps(new))
    assert load_quantized(llama_folder).generation_config.max_new_tokens == 77
    path.unlink()
    assert load_quantized(llama_folder).generation_config.max_new_tokens == 77


def save_filled(folder: Path, value: int) -> None:
    save_quantized(filled(value), folder, max_shard_size=300, overwrite=True)


@pytest.mark.slow
def test_loads_while_two_processes_save(folder: Path) -> None:
    found: Counter[str] = Counter()
    with savers(folder, save_filled, 2):
        limit = time.monotonic() + 2
        while time.monotonic() < limit:
            try:
                found[str(value_of(load_quantized(folder, model=empty)))] += 1
            except CheckpointError:
                found["refused"] += 1
    assert len(found) > 3
    assert sum(found.values()) > 3 * found["refused"]
    assert value_of(load_quantized(folder, model=empty)) > 3  # of whoever was last, also if that one was killed
    save_quantized(filled(5), folder, overwrite=True)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_second_saver_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = save.write_safetensors
    refused = []

    def write(*args: Any) -> None:
        with pytest.raises(CheckpointError, match="another process is saving"):
            save_quantized(filled(5), folder, overwrite=True)
        refused.append(True)
        original(*args)

    monkeypatch.setattr(save, "write_safetensors", write)
    save_quantized(filled(4), folder, overwrite=True)
    assert refused
    assert value_of(load_quantized(folder, model=empty)) == 4


# What the first version of qgemm wrote for two layers, of which the second one is quantized.
VERSION_1: dict[str, Any] = {
    "quant_method": "qgemm",
    "format_version": 1,
    "schemes": {
        "int8": {
            "name": "int8",
            "weight": {
                "dtype": "int8",
                "granularity": "channel",
                "dynamic": False,
                "symmetric": True,
                "group_size": None,
            },
            "activation": {
                "dtype": "int8",
                "granularity": "token",
                "dynamic": True,
                "symmetric": True,
                "group_size": None,
            },
        }
    },
    "layers": {"1": "int8"},
    "tied": {},
    "report": {
        "records": [
            {
                "name": "1",
                "kind": "Linear",
                "action": "int8",
                "reason": "",
                "bytes_before": 144,
                "bytes_after": 64,
                "weight_error": 3.725290298461914e-09,
            }
        ]
    },
}


def test_version_1_of_the_format_loads(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"quantization_config": VERSION_1}))
    tensors = {
        "0.weight": torch.eye(8),
        "0.bias": torch.zeros(8),
        "1.weight": torch.full((4, 8), INT8.high, dtype=torch.int8),
        "1.weight_scale": torch.full((4,), 1 / INT8.steps),
        "1.bias": torch.arange(4.0),
    }
    metadata = {"format": "pt", CHECKSUMS: json.dumps({name: CHECKSUMS_1[name] for name in tensors})}
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    model = load_quantized(tmp_path, model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    assert torch.allclose(model(torch.ones(8)), 8 + torch.arange(4.0))
    assert qgemm.report(model).records[0].bytes_before == 144
    set_save(tmp_path / CONFIG, "0123456789abcdef")
    with pytest.raises(CheckpointError, match="files of two checkpoints"):
        load_quantized(tmp_path, model=empty)


CHECKSUMS_1 = {
    "0.weight": "fe000000fe000000",
    "0.bias": "0000000000000000",
    "1.weight": "fdfdfdfdfdfdfdfc",
    "1.weight_scale": "7802040878020408",
    "1.bias": "7fc0000040000000",
}


def test_packed_rows_of_another_length_are_refused(tmp_path: Path) -> None:
    # Rows of 130 values take as many bytes as rows of 250.
    nets = {K: nn.ModuleDict({"a": nn.Linear(K, 8), "b": nn.Linear(K, 4)}) for K in (130, 250)}
    qgemm.save_quantized(qgemm.quantize_model(nets[130], "int4-channel"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["in_features"] == {"130": ["a", "b"]}
    with pytest.raises(CheckpointError, match="a has rows of 130 values; the model's have 250"):
        qgemm.load_quantized(tmp_path, model=nets[250])
    for value, message in (
        ({"130": ["c"]}, "in_features has c, which isn't a quantized layer"),
        ({"many": ["a"]}, "in_features has 'many', which isn't a number of columns"),
        ({"130": ["a", "a"]}, "in_features has a twice"),
        ([], "in_features must map numbers to lists of names"),
    ):
        config["quantization_config"]["in_features"] = value
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            qgemm.load_quantized(tmp_path, model=nets[130])
