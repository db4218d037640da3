"""A run that ends before its time leaves work that the next one verifies and goes on with."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint.faults import every_fault, every_kill, every_power_loss
from checkpoint.rewriting import edited
from safetensors.torch import load_file

import qgemm
from qgemm import CheckpointError, quantize_checkpoint
from qgemm.checkpoint.safetensors_writer import SafetensorsWriter
from qgemm.streaming import convert
from qgemm.streaming.journal import Begun, Journal
from qgemm.streaming.shard_plan import ShardPlan
from qgemm.streaming.shards import write_shard
from qgemm.streaming.workspace import open_workspace
from streaming.files import Stopped, assert_same_files, contents, quantize_whole, stop_after

OPTIONS: dict[str, Any] = {"max_shard_size": "10KB"}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the tensors of each file that is written from here on."""
    calls: list[list[str]] = []

    def record(file: Any, shard: ShardPlan, *args: Any) -> Any:
        calls.append(list(shard.tensors))
        return write_shard(file, shard, *args)

    monkeypatch.setattr(convert, "write_shard", record)
    return calls


def stop_at(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the next run write so many files and a part of one more."""
    left = [count]

    def stop(file: Any, *args: Any) -> Any:
        if not left[0]:
            file.write(b"half")
            raise Stopped
        left[0] -= 1
        return write_shard(file, *args)

    monkeypatch.setattr(convert, "write_shard", stop)


@pytest.fixture
def stopped(source: Path, tmp_path: Path) -> Path:
    """The destination of a run that ended after three files."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_at(3, monkeypatch)
        with pytest.raises(Stopped):
            quantize_checkpoint(source, tmp_path / "int8", **OPTIONS)
    assert not (tmp_path / "int8").exists()
    return tmp_path / "int8"


@pytest.fixture
def partial(stopped: Path) -> Path:
    """Its work."""
    return stopped.with_name("int8.partial")


def test_finished_files_are_not_made_again(
    source: Path, stopped: Path, partial: Path, written: list[list[str]], tmp_path: Path
) -> None:
    model = quantize_whole(source, tmp_path / "whole", **OPTIONS)
    files = {path.name for path in (partial / "content").iterdir()}
    whole = {path.name for path in (tmp_path / "whole").glob("model-*.safetensors")}
    assert files < whole
    assert len(files) == 3
    # The errors of weights in those files come from the journal.
    assert quantize_checkpoint(source, stopped, **OPTIONS) == qgemm.report(model)
    assert len(written) == len(whole) - 3
    assert_same_files(tmp_path / "whole", stopped)
    assert not partial.exists()


@pytest.mark.slow(quick=["values"])
@pytest.mark.parametrize("where", ["header", "values", "end", "gone"])
def test_a_finished_file_that_was_damaged_is_made_again(
    where: str, source: Path, stopped: Path, partial: Path, written: list[list[str]], tmp_path: Path
) -> None:
    quantize_whole(source, tmp_path / "whole", **OPTIONS)
    path = sorted((partial / "content").iterdir())[1]
    content = bytearray(path.read_bytes())
    if where == "gone":
        path.unlink()
    elif where == "end":
        path.write_bytes(content[:-8])
    else:
        content[20 if where == "header" else -3] ^= 1
        path.write_bytes(content)
    with pytest.warns(UserWarning, match=f"{path.name} differs from what was written"):
        quantize_checkpoint(source, stopped, **OPTIONS)
    assert written[0] == [name for name in written[0] if name in json_index(stopped, path.name)]
    assert_same_files(tmp_path / "whole", stopped)


def json_index(folder: Path, file_name: str) -> set[str]:
    """The tensors that the index puts into a file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name for name, file in index["weight_map"].items() if file == file_name}


def edit_config(source: Path) -> None:
    with edited(source / "config.json") as config:
        config["rms_norm_eps"] = 1e-5


def touch_weights(source: Path) -> None:
    os.utime(source / "model.safetensors", ns=(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"skip": "model.layers.0"}, r"skip was \[\], is \['model\.layers\.0'\]"),
        (None, {"max_shard_size": "20KB"}, r"max_shard_size was 10000, is 20000"),
        (edit_config, {}, r"config\.json is another now"),
        (touch_weights, {}, r"source "),
    ],
)
def test_work_on_something_else_is_left_alone(
    change: Callable[[Path], None] | None,
    options: dict[str, Any],
    message: str,
    source: Path,
    stopped: Path,
    partial: Path,
    tmp_path: Path,
) -> None:
    before = contents(partial / "content")
    if change is not None:
        change(source)
    with pytest.raises(CheckpointError, match=rf"int8\.partial holds another, unfinished run.*{message}.*resume=False"):
        quantize_checkpoint(source, stopped, **{**OPTIONS, **options})
    assert contents(partial / "content") == before
    quantize_whole(source, tmp_path / "whole", **{**OPTIONS, **options})
    quantize_checkpoint(source, stopped, **{**OPTIONS, **options}, resume=False)
    assert_same_files(tmp_path / "whole", stopped)
    assert not partial.exists()


def test_resume_false_makes_all_files_again(source: Path, stopped: Path, written: list[list[str]]) -> None:
    quantize_checkpoint(source, stopped, **OPTIONS, resume=False)
    assert len(written) == len(list(stopped.glob("model-*.safetensors")))


def test_a_finished_file_whose_tensors_changed_places_is_made_again(
    source: Path, stopped: Path, partial: Path, tmp_path: Path
) -> None:
    # Each tensor has a checksum that the header gives for one, but not for this one.
    path = sorted((partial / "content").iterdir())[1]
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    places: dict[int, tuple[int, int]] = {}
    for name, entry in json.loads(content[8:begin]).items():
        if name == "__metadata__":
            continue
        start, end = (begin + offset for offset in entry["data_offsets"])
        other = places.setdefault(end - start, (start, end))
        if other != (start, end):
            break
    one, two = content[start:end], content[other[0] : other[1]]
    assert one != two
    content[start:end], content[other[0] : other[1]] = two, one
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=f"{path.name} differs from what was written"):
        quantize_checkpoint(source, stopped, **OPTIONS)
    quantize_whole(source, tmp_path / "whole", **OPTIONS)
    assert_same_files(tmp_path / "whole", stopped)


def test_work_with_other_input_scales_is_left_alone(source: Path, tmp_path: Path) -> None:
    names = [record.name for record in qgemm.report(quantize_whole(source, tmp_path / "dynamic")).quantized]
    options: dict[str, Any] = {"scheme": "int8-static", **OPTIONS}
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_at(3, monkeypatch)
        with pytest.raises(Stopped):
            quantize_checkpoint(source, tmp_path / "int8", input_scales=dict.fromkeys(names, 0.01), **options)
    other = {**dict.fromkeys(names, 0.01), names[-1]: 0.02}
    with pytest.raises(
        CheckpointError, match=r"int8\.partial holds another, unfinished run.*input_scales .*resume=False"
    ):
        quantize_checkpoint(source, tmp_path / "int8", input_scales=other, **options)
    quantize_checkpoint(source, tmp_path / "int8", input_scales=other, **options, resume=False)
    quantize_whole(source, tmp_path / "whole", input_scales=other, **options)
    assert_same_files(tmp_path / "whole", tmp_path / "int8")


def test_work_with_another_calibration_is_left_alone(source: Path, tmp_path: Path) -> None:
    model = transformers.Qwen3ForCausalLM.from_pretrained(source)
    found = []
    for count in (3, 9):
        with qgemm.calibrate(model) as calibration, torch.no_grad():
            model(torch.arange(count)[None])
        found.append(calibration)
    options: dict[str, Any] = {"scheme": "int8-static", **OPTIONS}
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_at(3, monkeypatch)
        with pytest.raises(Stopped):
            quantize_checkpoint(source, tmp_path / "int8", calibration=found[0], **options)
    with pytest.raises(CheckpointError, match=r"holds another, unfinished run: input_scales is another now"):
        quantize_checkpoint(source, tmp_path / "int8", calibration=found[1], **options)
    quantize_checkpoint(source, tmp_path / "int8", calibration=found[0], **options)
    quantize_whole(source, tmp_path / "whole", calibration=found[0], **options)
    assert_same_files(tmp_path / "whole", tmp_path / "int8")


@pytest.mark.slow(quick=["True"])
@pytest.mark.parametrize("resume", [True, False])
def test_an_interrupt_says_how_far_the_work_is(
    resume: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qgemm.streaming.shards._BYTES_BETWEEN_NOTES", 1000)
    quantize_whole(source, tmp_path / "whole")
    again = "run the same again to continue" if resume else "run the same again, but with resume, to continue"
    with monkeypatch.context() as patched:
        stop_after(8, patched, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt, match=rf"\d\d% of the work is done.*in .*/int8\.partial; {again}"):
            quantize_checkpoint(source, tmp_path / "int8", resume=resume)
    quantize_checkpoint(source, tmp_path / "int8")
    assert_same_files(tmp_path / "whole", tmp_path / "int8")


def test_what_is_left_of_a_run_that_was_killed_after_it_published(
    source: Path, stopped: Path, partial: Path, tmp_path: Path
) -> None:
    # The journal speaks of files that aren't there any more.
    shutil.move(partial / "content", tmp_path / "published")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_checkpoint(source, stopped, skip="model.layers.0", **OPTIONS)
    assert not partial.exists()


@pytest.mark.slow(quick=["[]"])
@pytest.mark.parametrize("journal", ["{", "[]", '{"job": {}}', '{"job": JOB, "finished": {"a": 1}}'])
def test_a_journal_that_is_damaged(journal: str, source: Path, stopped: Path, partial: Path) -> None:
    path = partial / "journal.json"
    path.write_text(journal.replace("JOB", json.dumps(json.loads(path.read_text())["job"])))
    with pytest.raises(CheckpointError, match=r"resume=False"):
        quantize_checkpoint(source, stopped, **OPTIONS)
    quantize_checkpoint(source, stopped, **OPTIONS, resume=False)


def test_a_journal_that_names_files_elsewhere(source: Path, stopped: Path, partial: Path, tmp_path: Path) -> None:
    shutil.copy(next((partial / "content").iterdir()), tmp_path / "elsewhere")
    with edited(partial / "journal.json") as journal:
        one = next(iter(journal["finished"].values()))
        journal["finished"]["../../elsewhere"] = {**one, "errors": {"no.such.weight": 0.5}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_checkpoint(source, stopped, **OPTIONS)
    assert (tmp_path / "elsewhere").exists()
    quantize_whole(source, tmp_path / "whole", **OPTIONS)
    assert_same_files(tmp_path / "whole", stopped)


def test_the_destination_must_be_new(source: Path, tmp_path: Path) -> None:
    (tmp_path / "int8").mkdir()
    quantize_checkpoint(source, tmp_path / "int8")  # an empty folder will do
    before = contents(tmp_path / "int8")
    with pytest.raises(FileExistsError, match=r"int8 exists already.*another destination"):
        quantize_checkpoint(source, tmp_path / "int8")
    with pytest.raises(FileExistsError, match=r"float exists already"):
        quantize_checkpoint(source, source)
    assert contents(tmp_path / "int8") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "int8"]


def test_a_folder_of_somebody_else(source: Path, tmp_path: Path) -> None:
    (tmp_path / "int8.partial").mkdir()
    (tmp_path / "int8.partial" / "notes").touch()
    with pytest.raises(FileExistsError, match=r"int8\.partial exists, and isn't a folder"):
        quantize_checkpoint(source, tmp_path / "int8", resume=False)
    assert (tmp_path / "int8.partial" / "notes").exists()


def test_a_file_where_the_folder_should_be(source: Path, tmp_path: Path) -> None:
    (tmp_path / "int8.partial").touch()
    with pytest.raises(FileExistsError, match=r"int8\.partial exists, and isn't a folder"):
        quantize_checkpoint(source, tmp_path / "int8", resume=False)


def test_a_destination_that_somebody_else_fills_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_whole(source, tmp_path / "whole")

    def fill_then_write(*args: Any) -> Any:
        (tmp_path / "int8").mkdir()
        (tmp_path / "int8" / "theirs").touch()
        return write_shard(*args)

    with monkeypatch.context() as patched:
        patched.setattr(convert, "write_shard", fill_then_write)
        with pytest.raises(FileExistsError, match=r"int8 exists already"):
            quantize_checkpoint(source, tmp_path / "int8")
    assert [path.name for path in (tmp_path / "int8").iterdir()] == ["theirs"]
    shutil.rmtree(tmp_path / "int8")
    quantize_checkpoint(source, tmp_path / "int8")
    assert_same_files(tmp_path / "whole", tmp_path / "int8")


def test_two_runs_at_once(source: Path, tmp_path: Path) -> None:
    other = open_workspace(tmp_path / "int8", {})
    with other, pytest.raises(CheckpointError, match=r"another process uses .*int8\.partial"):
        quantize_checkpoint(source, tmp_path / "int8")


def make(folder: Path, stop: bool = False) -> None:
    """What a run does to the disk: two shards, one of which is noted when it is half written, and another file."""
    with open_workspace(folder / "int8", {"job": 1}) as workspace:
        workspace.recover(SHARDS, lambda count: None)
        for name, tensors in SHARDS.items():
            if name in workspace.finished:
                continue
            with workspace.open_shard(name) as (file, begun):
                writer = SafetensorsWriter(file, tensors)
                if not writer.go_on(begun.written):
                    begun = Begun(name)
                for tensor_name, tensor in list(tensors.items())[begun.units :]:
                    writer.write(tensor_name, tensor)
                    begun = Begun(name, writer.written, begun.units + 1)
                    workspace.note_begun(begun, file)
                    if stop and workspace.finished:
                        raise Stopped
                writer.finish()
            workspace.note_finished(name, {"x": 0.5})
        with workspace.create("additional_chat_templates/tool.jinja") as file:
            file.write(b"tool")
        workspace.publish()


SHARDS = {
    "model-00001-of-00002.safetensors": {"a": torch.arange(10), "b": torch.ones(3)},
    "model-00002-of-00002.safetensors": {"c": torch.ones(5), "d": torch.arange(11)},
}


def made(folder: Path) -> str:
    """ "nothing" or "whole"; and what the journal says is true, and all is well after the next run."""
    is_published = (folder / "int8").exists()
    journal_path = folder / "int8.partial" / "journal.json"
    if journal_path.exists() and not is_published:
        journal = Journal.read(journal_path)
        content = folder / "int8.partial" / "content"
        for name in journal.finished:
            read_and_compare(content / name, SHARDS[name])
    if not is_published:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file that was lost after it was noted
            make(folder)
    names = sorted(str(path.relative_to(folder / "int8")) for path in (folder / "int8").rglob("*") if path.is_file())
    assert names == ["additional_chat_templates/tool.jinja", *SHARDS]
    assert (folder / "int8" / "additional_chat_templates" / "tool.jinja").read_bytes() == b"tool"
    for name, tensors in SHARDS.items():
        read_and_compare(folder / "int8" / name, tensors)
    return "whole" if is_published else "nothing"


def read_and_compare(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to know which file is meant")


@pytest.mark.slow(quick=["one failure"])
@ON_LINUX
@pytest.mark.parametrize("lasting", [False, True], ids=["one failure", "full disk"])
def test_an_error_at_any_moment(lasting: bool, tmp_path: Path) -> None:
    found = every_fault(lambda: new_folder(tmp_path / "work"), make, made, lasting=lasting, step=4)
    assert set(found) == {"nothing", "whole"}


@pytest.mark.slow
@ON_LINUX
def test_a_kill_at_any_moment(tmp_path: Path) -> None:
    found = every_kill(lambda: new_folder(tmp_path / "work"), make, made, step=3)
    assert set(found) == {"nothing", "whole"}


@pytest.mark.slow
@ON_LINUX
def test_a_power_loss_at_any_moment(tmp_path: Path) -> None:
    at_any_moment, at_the_end = every_power_loss(new_folder(tmp_path / "work"), make, made, tmp_path / "after")
    assert set(at_any_moment) == {"nothing", "whole"}
    assert set(at_the_end) == {"whole"}


@ON_LINUX
def test_what_was_noted_of_a_file_outlives_a_power_loss(tmp_path: Path) -> None:
    def make_a_part(folder: Path) -> None:
        with pytest.raises(Stopped):
            make(folder, stop=True)

    def part(folder: Path) -> str:
        if not (folder / "int8.partial" / "journal.json").exists():
            return "nothing"
        noted = Journal.read(folder / "int8.partial" / "journal.json").begun
        if not noted:
            return "nothing"
        (begun,) = noted.values()
        with (folder / "int8.partial" / "content" / begun.name).open("r+b") as file:
            if begun.name == list(SHARDS)[1]:
                assert SafetensorsWriter(file, SHARDS[begun.name]).go_on(begun.written)
        return f"{begun.units} of {begun.name}"

    _, at_the_end = every_power_loss(new_folder(tmp_path / "work"), make_a_part, part, tmp_path / "after")
    assert set(at_the_end) == {"1 of model-00002-of-00002.safetensors"}


def new_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@pytest.mark.slow
@ON_LINUX
def test_a_process_that_is_killed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # At every so-manieth thing that it does to the disk; what workspaces do is tried above at each.
    monkeypatch.setattr("qgemm.streaming.shards._BYTES_BETWEEN_NOTES", 10_000)
    options: dict[str, Any] = {"max_shard_size": "60KB", "progress": False}
    quantize_whole(source, tmp_path / "whole", max_shard_size="60KB")

    def outcome(folder: Path) -> str:
        is_published = (folder / "int8").exists()
        if not is_published:
            quantize_checkpoint(source, folder / "int8", **options)
        assert_same_files(tmp_path / "whole", folder / "int8")
        return "whole" if is_published else "nothing"

    found = every_kill(
        lambda: new_folder(tmp_path / "work"),
        lambda folder: quantize_checkpoint(source, folder / "int8", **options),
        outcome,
        step=13,
    )
    assert found["nothing"] >= 5
