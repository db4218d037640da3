"""Worker processes, which write files of the checkpoint for another process, one after the other.

A worker is a new Python process, so it can be started even if CUDA is in use, and from any script. It starts while the
caller plans. The two exchange lines of JSON through pipes: the caller describes a file's contents, the worker fills the
file and reports its progress. A worker doesn't import transformers, which takes seconds, unless a file contains tensors
that only transformers' code can make. Only the caller handles names, the journal and finished files. A worker ends with
its caller, and holds the caller's lock from its first file until then, so that no unknown process writes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import torch

from qgemm.checkpoint.errors import CheckpointError
from qgemm.streaming.float_tensors import FloatTensor, parse_float
from qgemm.streaming.journal import Begun, parse_begun
from qgemm.streaming.loading import plan_loading
from qgemm.streaming.shard_plan import ShardPlan
from qgemm.streaming.shards import write_shard
from qgemm.streaming.source import Source, open_source

# The module path is the caller's, however it was set.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qgemm.streaming.workers import serve_caller; serve_caller(int(sys.argv[2]))"
)

# Of float values, a few hundredths of a second: the caller also quantizes, and reads answers in between.
_BYTES_BETWEEN_ANSWERS = 16 << 20


class WorkerError(RuntimeError):
    """A worker process failed, or was killed."""


class Worker:
    """A worker process as its caller sees it. ``started_worker`` starts one."""

    def __init__(self, process: subprocess.Popen[bytes], files: socket.socket | None) -> None:
        """``process``: reads lines from its standard input, and writes lines to its standard output.

        ``files``: the socket through which it gets open files; None on systems without that, which have no such locks.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._input, self._output, self._files = process.stdin, process.stdout, files

    def begin(self, lock: BinaryIO) -> None:
        """To be called before the first file. ``lock``: an open file, which the worker keeps open as well."""
        if self._files is not None:
            with suppress(OSError):  # it has ended, which shows when it doesn't answer
                socket.send_fds(self._files, [b"."], [lock.fileno()])

    def write_shard(
        self,
        file: BinaryIO,
        shard: ShardPlan,
        done: Callable[[int], object],
        begun: Begun,
        note: Callable[[Begun], object],
        metadata: Mapping[str, str],
    ) -> dict[str, float]:
        """Does what ``shards.write_shard`` does, in the worker process.

        ``file`` must have a name, by which the worker opens it. Raises ``WorkerError`` if the worker ends or reports an
        unexpected error; a ``CheckpointError`` or ``OSError`` is raised as it is.
        """
        wanted = {"file": file.name, "shard": shard.to_dict(), "begun": asdict(begun), "metadata": dict(metadata)}
        self.send(wanted)
        while True:
            message = self._receive(file)
            if "done" in message:
                done(message["done"])
            elif "begun" in message:
                note(parse_begun(message["begun"]))
            elif "errors" in message:
                return dict(message["errors"])
            else:
                _raise(**message["error"])

    def send(self, message: dict[str, Any]) -> None:
        """Sends the process a message; if the process has ended, that shows when it doesn't answer."""
        with suppress(OSError):
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

    def stop(self) -> None:
        """Ends the process; files that it was writing stay as they are."""
        self.process.kill()
        self.process.wait()
        for pipe in (self._input, self._output):
            with suppress(OSError):
                pipe.close()
        if self._files is not None:
            self._files.close()

    def _receive(self, file: BinaryIO) -> dict[str, Any]:
        line = self._output.readline()
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        code = self.process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            how += ", as the system does where memory runs out," if -code == getattr(signal, "SIGKILL", 0) else ""
        raise WorkerError(f"worker process {self.process.pid} {how} while it wrote {file.name}")


@contextmanager
def started_worker(source: Path, drop: list[str], device: torch.device) -> Iterator[Worker]:
    """Starts a process that quantizes on ``device`` until the block ends. ``drop``: as for ``plan_loading``."""
    worker = Worker(*start_process())
    try:
        worker.send({"source": str(source), "drop": drop, "device": str(device)})
        yield worker
    finally:
        worker.stop()


def start_process() -> tuple[subprocess.Popen[bytes], socket.socket | None]:
    """Starts a Python that runs ``serve_caller``; also returns the socket that passes open files to it."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    if os.name != "posix":
        return subprocess.Popen([*command, "-1"], **pipes), None
    files, theirs = socket.socketpair()
    with theirs:
        return subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], **pipes), files


def serve_caller(files: int) -> None:
    """The main function of a worker process: serves requests from its standard input until that is closed.

    ``files``: the descriptor of the socket for open files, or -1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries' prints must not mix with answers

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_receive_all, args=(messages.put,), daemon=True).start()
    try:
        torch.set_num_threads(1)
        _work(messages.get, answer, files)
    except BaseException as error:
        kind = "checkpoint" if isinstance(error, CheckpointError) else "system" if isinstance(error, OSError) else ""
        said = (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
        number = error.errno if isinstance(error, OSError) else None
        answer(error={"kind": kind, "number": number, "said": said, "trace": traceback.format_exc()})


def _receive_all(put: Callable[[dict[str, Any]], object]) -> None:
    with os.fdopen(0, "rb") as lines:
        for line in lines:
            put(json.loads(line))
    os._exit(0)  # the caller has ended, or needs no worker any more


def _work(receive: Callable[[], dict[str, Any]], answer: Callable[..., object], files: int) -> None:
    first = receive()
    device = torch.device(first["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise every process would use some memory of the first GPU
    with open_source(Path(first["source"])) as opened:
        parse = partial(parse_float, source=opened, made=_Loading(opened, first["drop"]).find)
        if files >= 0:
            with socket.socket(fileno=files) as given:
                socket.recv_fds(given, 1, 1)  # the lock's file, which stays open until this process ends
        while True:
            wanted = receive()
            _write(ShardPlan.from_dict(wanted["shard"], parse), device, wanted, answer)


class _Loading:
    """The tensors of the float model that only transformers can make, found as in the caller's plan."""

    def __init__(self, opened: Source, drop: list[str]) -> None:
        """Loads nothing yet."""
        self._opened, self._drop = opened, drop

    def find(self, values: dict[str, Any]) -> FloatTensor:
        """The tensor described by ``values``; raises ``CheckpointError`` if it is a different one here."""
        try:
            found = self._tensors.get(values["made"])
            difference = f"it finds another {values['made']}"
        except (CheckpointError, ValueError) as error:
            found, difference = None, str(error)
        if found is None or found.to_dict() != values:
            raise CheckpointError(
                f"a worker process doesn't come to the plan for {self._opened.folder} that this one has: {difference}. "
                "If this program changes transformers, by registering a model for example, pass workers=1"
            )
        return found

    @cached_property
    def _tensors(self) -> dict[str, FloatTensor]:
        from transformers.utils import logging

        logging.set_verbosity_error()  # the caller has already shown these messages
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return plan_loading(self._opened, self._drop).tensors


def _write(shard: ShardPlan, device: torch.device, wanted: dict[str, Any], answer: Callable[..., object]) -> None:
    path, begun = Path(wanted["file"]), parse_begun(wanted["begun"])
    untold = 0

    def tell(count: int, at_least: int = _BYTES_BETWEEN_ANSWERS) -> None:
        nonlocal untold
        untold += count
        if untold >= at_least:
            answer(done=untold)
            untold = 0

    def note(begun: Begun) -> None:
        file.flush()  # the caller makes sure that it reaches the disk
        answer(begun=asdict(begun))

    with path.open("r+b") as file:
        errors = write_shard(file, shard, device, tell, begun, note, wanted["metadata"])
    tell(0, at_least=0)
    answer(errors=errors)


def _raise(kind: str, number: int | None, said: str, trace: str) -> None:
    if kind == "checkpoint":
        raise CheckpointError(said)
    if kind == "system":
        raise OSError(number, said)
    raise WorkerError(f"a worker process failed: {said}") from WorkerError(trace)
