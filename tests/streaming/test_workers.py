"""Several processes write the files of one; whatever becomes of one of them is said, and the work goes on from there.

A process of its own imports PyTorch for seconds, so all but two tests fork this one.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from checkpoint.rewriting import contents

import qgemm
from qgemm import CheckpointError, quantize_checkpoint
from qgemm.checkpoint.disk import lock_file
from qgemm.checkpoint.layout import REPORT_FILE
from qgemm.streaming import convert, workers
from qgemm.streaming.journal import Begun
from qgemm.streaming.loading import FloatModel, plan_loading
from qgemm.streaming.shards import write_shard
from qgemm.streaming.workspace import Workspace
from streaming.files import assert_same_files, edit_tensors, quantize_whole

OPTIONS: dict[str, Any] = {"max_shard_size": "10KB", "progress": False}
ON_LINUX = pytest.mark.skipif(sys.platform == "win32", reason="forks")


class Forked:
    """A copy of this process that does what a worker does; what ``Worker`` uses of a ``Popen``."""

    def __init__(self) -> None:
        (to_read, own), (other, to_write) = os.pipe(), os.pipe()
        self.files, theirs = socket.socketpair()
        self.returncode: int | None = None
        self._waiting = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            try:
                for descriptor, standard in ((to_read, 0), (to_write, 1)):
                    os.dup2(descriptor, standard)
                os.close(own)  # whose end is that of the caller
                self.files.close()
                workers.serve_caller(theirs.detach())
            finally:
                os._exit(0)
        os.close(to_read)
        os.close(to_write)
        theirs.close()
        self.stdin, self.stdout = os.fdopen(own, "wb"), os.fdopen(other, "rb")

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        with self._waiting:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[Forked]:
    """The workers that are started from here on, which begin with all that this process has imported and changed."""
    started: list[Forked] = []

    def start() -> tuple[Forked, socket.socket]:
        started.append(Forked())
        return started[-1], started[-1].files

    monkeypatch.setattr(workers, "start_process", start)
    return started


def in_workers(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Lets every worker ``act`` when it has begun to write its first file."""

    def write(file: Any, *args: Any) -> Any:
        file.write(b"half")
        file.flush()
        act()
        return write_shard(file, *args)

    monkeypatch.setattr(workers, "write_shard", write)


@pytest.mark.slow
def test_two_processes_write_the_files_of_one(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other process, whose module path is that of this one, imports no transformers.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "transformers.py").write_text("raise ImportError('a worker needs no transformers')")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    model = quantize_whole(source, tmp_path / "whole", max_shard_size="10KB", skip=re.compile("LAYERS.0.*_proj", re.I))
    options: dict[str, Any] = {**OPTIONS, "skip": re.compile("LAYERS.0.*_proj", re.I)}
    capfd.readouterr()
    report = quantize_checkpoint(source, tmp_path / "streamed", **options, workers=2)
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
    assert report == qgemm.report(model)
    assert not (tmp_path / "streamed.partial").exists()
    assert capfd.readouterr().err == ""


@ON_LINUX
@pytest.mark.parametrize("count", [3, 99], ids=["three", "more than files"])
def test_the_files_are_the_same_however_many_write(
    count: int, source: Path, tmp_path: Path, forked: list[Forked], capfd: pytest.CaptureFixture[str]
) -> None:
    quantize_whole(source, tmp_path / "whole", max_shard_size="20KB")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quantize_checkpoint(source, tmp_path / "streamed", max_shard_size="20KB", workers=count, progress=True)
    message = r"workers is 99, and there are \d+ files to write, each by one process: pass a smaller max_shard_size"
    # Python 3.12 says that it forks beside other threads.
    own = [str(each.message) for each in said if each.category is not DeprecationWarning]
    assert [bool(re.match(message, each)) for each in own] == [True] * (count == 99)
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
    files = len(list((tmp_path / "whole").glob("model-*.safetensors")))
    assert min(count, files) - 1 <= len(forked) <= min(count - 1, 4 * files)
    assert all(process.returncode is not None for process in forked)
    assert re.search(r"quantize: 100%.* (\d+)k/\1k ", capfd.readouterr().err)


@ON_LINUX
def test_a_worker_that_is_killed(
    source: Path, tmp_path: Path, forked: list[Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:
        wait_until(lambda: len(finished(tmp_path / "int8.partial")) > 3)
        os.kill(os.getpid(), signal.SIGKILL)

    quantize_whole(source, tmp_path / "whole", max_shard_size="10KB")
    with monkeypatch.context() as patched:
        in_workers(patched, end)
        with pytest.raises(
            RuntimeError,
            match=r"^worker process \d+ was ended by SIGKILL, as the system does where memory runs out, while it wrote "
            r".*/int8\.partial/content/model-\d+-of-\d+\.safetensors\. What is finished is kept in .*/int8\.partial; "
            r"run the same again to continue from there$",
        ):
            quantize_checkpoint(source, tmp_path / "int8", **OPTIONS, workers=2)
    assert not (tmp_path / "int8").exists()
    there = {path.name for path in (tmp_path / "int8.partial" / "content").iterdir()}
    assert there == set(finished(tmp_path / "int8.partial"))
    quantize_checkpoint(source, tmp_path / "int8", **OPTIONS)
    assert_same_files(tmp_path / "whole", tmp_path / "int8")


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail() -> None:
    raise MemoryError("no memory for 3 bytes")


@ON_LINUX
@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (fill_disk, OSError, r"int8 can't be written: No space left on device\. What is finished is kept in"),
        (fail, RuntimeError, r"a worker process failed: no memory for 3 bytes\. What is finished is kept in"),
        (lambda: os._exit(3), RuntimeError, r"worker process \d+ ended with exit code 3 while it wrote"),
    ],
    ids=["disk", "memory", "exit"],
)
def test_an_error_in_a_worker(
    act: Callable[[], object],
    error: type[Exception],
    message: str,
    source: Path,
    tmp_path: Path,
    forked: list[Forked],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_workers(monkeypatch, act)
    with pytest.raises(error, match=message):
        quantize_checkpoint(source, tmp_path / "int8", **OPTIONS, workers=2)
    assert not (tmp_path / "int8").exists()


@ON_LINUX
def test_a_weight_with_nan_is_named_whoever_reads_it(source: Path, tmp_path: Path, forked: list[Forked]) -> None:
    broken = {
        f"model__layers__{layer}__mlp__{part}_proj__weight": torch.full(shape, torch.nan).bfloat16()
        for layer in (0, 1)
        for part, shape in (("up", (96, 64)), ("gate", (96, 64)), ("down", (64, 96)))
    }
    edit_tensors(source, **broken)
    with pytest.raises(CheckpointError, match=r"^the weight of 'model\.layers\.\d\.mlp\.\w+' holds NaN or Inf"):
        quantize_checkpoint(source, tmp_path / "streamed", **OPTIONS, workers=3)


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """A checkpoint of which code of transformers makes weights: those of queries, keys and values from one tensor."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = transformers.NomicBertModel(transformers.NomicBertConfig(**sizes, num_attention_heads=4))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "float")
    assert b"Wqkv" in (tmp_path / "float" / "model.safetensors").read_bytes()
    return tmp_path / "float"


@ON_LINUX
def test_weights_that_code_of_transformers_makes(converted: Path, tmp_path: Path, forked: list[Forked]) -> None:
    quantize_whole(converted, tmp_path / "whole", max_shard_size="10KB")
    quantize_checkpoint(converted, tmp_path / "streamed", **OPTIONS, workers=2)
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")


@ON_LINUX
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.clear(), r"it finds another \S*self_attn\.\w_proj\.weight"),
        (lambda tensors: fail_to_load(), r"no such model"),
    ],
    ids=["other tensors", "none"],
)
def test_a_worker_for_which_transformers_makes_something_else(
    change: Callable[[dict[str, Any]], object],
    message: str,
    converted: Path,
    tmp_path: Path,
    forked: list[Forked],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*args: Any) -> FloatModel:
        found = plan_loading(*args)
        change(found.tensors)
        return found

    monkeypatch.setattr(workers, "plan_loading", load)
    with pytest.raises(CheckpointError, match=rf"doesn't come to the plan .*: {message}\. .*pass workers=1"):
        quantize_checkpoint(converted, tmp_path / "streamed", **OPTIONS, workers=2)


def fail_to_load() -> None:
    raise CheckpointError("no such model")


@ON_LINUX
def test_an_interrupted_run_goes_on_in_every_file_that_was_begun(
    source: Path, tmp_path: Path, forked: list[Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(self: Workspace, begun: Begun, file: Any) -> None:
        note_begun(self, begun, file)
        wait_until(lambda: len(self.begun) == 2)
        raise KeyboardInterrupt

    quantize_whole(source, tmp_path / "whole", max_shard_size="50KB")
    monkeypatch.setattr("qgemm.streaming.shards._BYTES_BETWEEN_NOTES", 1000)
    with monkeypatch.context() as patched:
        note_begun = Workspace.note_begun
        patched.setattr(Workspace, "note_begun", note)
        with pytest.raises(KeyboardInterrupt, match=r"\d+% of the work is done"):
            quantize_checkpoint(source, tmp_path / "int8", max_shard_size="50KB", workers=2)
    before = json.loads((tmp_path / "int8.partial" / "journal.json").read_text())["begun"]
    assert all(begun["read"] > 0 for begun in before.values())
    went_on = []
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("error")  # of a file that isn't what the journal says
        patched.setattr(convert, "write_shard", lambda *args: went_on.append(args[-3].read) or write_shard(*args))
        quantize_checkpoint(source, tmp_path / "int8", max_shard_size="50KB")
    assert went_on == [before[name]["read"] for name in sorted(before)]
    assert_same_files(tmp_path / "whole", tmp_path / "int8")


@ON_LINUX
def test_a_caller_that_is_killed(source: Path, tmp_path: Path, forked: list[Forked]) -> None:
    # Its worker, which is at work, ends too, and until then nobody else may write there.
    quantize_whole(source, tmp_path / "whole", max_shard_size="10KB")
    caller = os.fork()
    if not caller:
        try:
            with pytest.MonkeyPatch.context() as patched:
                in_workers(patched, lambda: time.sleep(60))
                quantize_checkpoint(source, tmp_path / "int8", **OPTIONS, workers=2)
        finally:
            os._exit(0)
    wait_until(lambda: len(finished(tmp_path / "int8.partial")) > 3)
    os.kill(caller, signal.SIGKILL)
    os.waitpid(caller, 0)
    with (tmp_path / "int8.partial" / "lock").open("ab") as lock:
        wait_until(lambda: lock_file(lock))
    quantize_checkpoint(source, tmp_path / "int8", **OPTIONS)
    assert_same_files(tmp_path / "whole", tmp_path / "int8")


@pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")
def test_a_worker_keeps_the_lock_of_its_caller(source: Path, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("ab") as other:
        with (tmp_path / "lock").open("ab") as lock:
            assert lock_file(lock)
            with workers.started_worker(source, [], torch.device("cpu")) as worker:
                worker.begin(lock)
                lock.close()
                assert not lock_file(other)
        assert lock_file(other)


def finished(partial: Path) -> dict[str, Any]:
    """The files that the journal calls done."""
    path = partial / "journal.json"
    return dict(json.loads(path.read_text())["finished"]) if path.exists() else {}


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(600):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError("it never was")


def test_devices_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(device: str, count: int) -> list[str]:
        return [str(each) for each in convert._devices(device, count)]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert devices("cuda", 4) == ["cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert devices("cuda:2", 2) == ["cuda:2", "cuda:2"]
    assert devices("cpu", 2) == ["cpu", "cpu"]
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"workers is {count}; it must be a number of processes, 1 or more"):
            devices("cpu", count)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scheme", ["int8", "int8-hadamard", "fp8", "int4", "mxfp4"])
def test_two_processes_on_gpus_write_the_files_of_one(scheme: str, source: Path, tmp_path: Path) -> None:
    """With a GPU each, or one for both; and all but the errors in the report are those of the CPU."""
    on_cpu = quantize_checkpoint(source, tmp_path / "cpu", scheme, **OPTIONS)
    quantize_checkpoint(source, tmp_path / "one", scheme, **OPTIONS, device="cuda")  # in use when a worker starts
    on_gpus = quantize_checkpoint(source, tmp_path / "two", scheme, **OPTIONS, device="cuda", workers=2)
    assert_same_files(tmp_path / "one", tmp_path / "two")
    files, expected = contents(tmp_path / "two"), contents(tmp_path / "cpu")
    assert len([name for name in expected if name.endswith(".safetensors")]) > 2
    assert files.keys() == expected.keys()
    assert [name for name in files if files[name] != expected[name] and name != REPORT_FILE] == []
    errors = [[record.weight_error or 0 for record in report.records] for report in (on_gpus, on_cpu)]
    assert errors[0] == pytest.approx(errors[1], rel=2**-22)  # last bits of sums in float32


def test_workers_without_a_file_end_first() -> None:
    done: list[str] = []

    def fake(name: str) -> Any:
        stop, begin = partial(done.append, f"{name} stops"), partial(done.append, f"{name} begins")
        return SimpleNamespace(stop=stop, begin=lambda lock: begin(), write_shard=None)

    shards: Any = SimpleNamespace(left=["a", "b"], write=lambda write: None, failure=None)
    convert._write_shards(shards, torch.device("cpu"), [fake("first"), fake("second")], io.BytesIO())
    assert done == ["second stops", "first begins", "first stops"]
