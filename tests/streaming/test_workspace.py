"""A run that ends before its time leaves work that the next one verifies and goes on with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qgemm
from qgemm import CheckpointError, quantize_checkpoint
from qgemm.streaming import convert
from qgemm.streaming.shards import write_shard
from qgemm.streaming.workspace import open_workspace
from streaming.files import assert_same_files, contents, quantize_whole

OPTIONS: dict[str, Any] = {"max_shard_size": "10KB"}


class Stopped(Exception):
    pass


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the tensors of each file that is written from here on."""
    calls: list[list[str]] = []

    def record(file: Any, plan: Any, names: list[str], *args: Any) -> Any:
        calls.append(names)
        return write_shard(file, plan, names, *args)

    monkeypatch.setattr(convert, "write_shard", record)
    return calls


def stop_at(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the next run write so many files and a part of one more."""
    left = [count]

    def stop(file: Any, plan: Any, names: list[str], *args: Any) -> Any:
        if not left[0]:
            file.write(b"half")
            raise Stopped
        left[0] -= 1
        return write_shard(file, plan, names, *args)

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
    files = sorted(path.name for path in (partial / "content").iterdir())
    total = len(list((tmp_path / "whole").glob("model-*.safetensors")))
    assert files == [f"model-{number:05d}-of-{total:05d}.safetensors" for number in (1, 2, 3)]
    # The errors of weights in those files come from the journal.
    assert quantize_checkpoint(source, stopped, **OPTIONS) == qgemm.report(model)
    assert len(written) == total - 3
    assert_same_files(tmp_path / "whole", stopped)
    assert not partial.exists()


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
    with pytest.warns(UserWarning, match=f"{path.name} isn't as it was written"):
        quantize_checkpoint(source, stopped, **OPTIONS)
    assert written[0] == [name for name in written[0] if name in json_index(stopped, path.name)]
    assert_same_files(tmp_path / "whole", stopped)


def json_index(folder: Path, file_name: str) -> set[str]:
    """The tensors that the index puts into a file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name for name, file in index["weight_map"].items() if file == file_name}


def edit_config(source: Path) -> None:
    path = source / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def touch_weights(source: Path) -> None:
    os.utime(source / "model.safetensors", ns=(1, 1))


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
    with pytest.raises(CheckpointError, match=rf"int8\.partial holds the beginnings.*{message}.*resume=False"):
        quantize_checkpoint(source, stopped, **{**OPTIONS, **options})
    assert contents(partial / "content") == before
    quantize_whole(source, tmp_path / "whole", **{**OPTIONS, **options})
    quantize_checkpoint(source, stopped, **{**OPTIONS, **options}, resume=False)
    assert_same_files(tmp_path / "whole", stopped)
    assert not partial.exists()


def test_resume_false_makes_all_files_again(source: Path, stopped: Path, written: list[list[str]]) -> None:
    quantize_checkpoint(source, stopped, **OPTIONS, resume=False)
    assert len(written) == len(list(stopped.glob("model-*.safetensors")))


@pytest.mark.parametrize("journal", ["{", "[]", '{"job": {}}', '{"job": JOB, "finished": {"a": 1}}'])
def test_a_journal_that_is_damaged(journal: str, source: Path, stopped: Path, partial: Path) -> None:
    path = partial / "journal.json"
    path.write_text(journal.replace("JOB", json.dumps(json.loads(path.read_text())["job"])))
    with pytest.raises(CheckpointError, match=r"resume=False"):
        quantize_checkpoint(source, stopped, **OPTIONS)
    quantize_checkpoint(source, stopped, **OPTIONS, resume=False)


def test_a_journal_that_names_files_elsewhere(source: Path, stopped: Path, partial: Path, tmp_path: Path) -> None:
    path = partial / "journal.json"
    journal = json.loads(path.read_text())
    one = next(iter(journal["finished"].values()))
    shutil.copy(next((partial / "content").iterdir()), tmp_path / "elsewhere")
    journal["finished"]["../../elsewhere"] = {**one, "errors": {"no.such.weight": 0.5}}
    path.write_text(json.dumps(journal))
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
    with pytest.raises(FileExistsError, match=r"int8\.partial is in the way"):
        quantize_checkpoint(source, tmp_path / "int8", resume=False)
    assert (tmp_path / "int8.partial" / "notes").exists()


def test_two_runs_at_once(source: Path, tmp_path: Path) -> None:
    other = open_workspace(tmp_path / "int8", {})
    with other, pytest.raises(CheckpointError, match=r"another process works in .*int8\.partial"):
        quantize_checkpoint(source, tmp_path / "int8")


# Runs again and again, each run killed a little later: at the first, second, third... of the moments when something
# reaches the disk. Each run is a fork, since importing takes seconds.
_KILLED_RUNS = """
import os, signal, sys
from pathlib import Path
import transformers.models.qwen3.modeling_qwen3
import qgemm

source, destination = Path(sys.argv[1]), Path(sys.argv[2])
moments = ("fsync", "replace", "rename", "unlink")

def run(deadline):
    passed = 0
    def die_at(function):
        def call(*args, **kwargs):
            nonlocal passed
            passed += 1
            if passed == deadline:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for moment in moments:
        setattr(os, moment, die_at(getattr(os, moment)))
    qgemm.quantize_checkpoint(source, destination, max_shard_size="60KB", progress=False)
    os._exit(0)

kills = 0
while True:
    child = os.fork()
    if child == 0:
        run(kills + 1)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WIFSIGNALED(status), status
    kills += 1
    if destination.exists():
        names = sorted(path.name for path in destination.iterdir())
        assert "config.json" in names and "model.safetensors.index.json" in names, names
        break
print(kills)
"""


def test_a_process_that_is_killed_at_any_moment(source: Path, tmp_path: Path) -> None:
    quantize_whole(source, tmp_path / "whole", max_shard_size="60KB")
    result = subprocess.run(
        [sys.executable, "-c", _KILLED_RUNS, str(source), str(tmp_path / "int8")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 5
    assert_same_files(tmp_path / "whole", tmp_path / "int8")
