"""Worker processes: each writes files of the checkpoint that another process makes, one after the other.

A worker is a new Python, so it may be started wherever CUDA is in use, and from any script. It makes the plan again
from the arguments, while the caller makes its own, and ends if it comes to another one. Both talk in lines of JSON
through pipes: the caller names a file, the worker fills it and says how far it is. Names, journal and what becomes of
the files are the caller's. A worker ends with its caller, and holds the caller's lock from its first file until then,
so nobody writes who isn't known of.
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
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import torch

from qgemm.checkpoint.errors import CheckpointError
from qgemm.streaming.job import Job
from qgemm.streaming.journal import Begun, parse_begun
from qgemm.streaming.plan import CheckpointPlan
from qgemm.streaming.shards import write_shard
from qgemm.streaming.source import Source, open_source

# The module path is the caller's, however that came about.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qgemm.streaming.workers import serve_caller; serve_caller(int(sys.argv[2]))"
)


class WorkerError(RuntimeError):
    """A worker process failed, or was ended by somebody else."""


class Worker:
    """A worker process as its caller sees it. ``started_worker`` starts one."""

    def __init__(self, process: subprocess.Popen[bytes], files: socket.socket | None) -> None:
        """``process``: reads lines from its standard input, and writes some to its standard output.

        ``files``: through which it is given open files; None where that can't be done, which has no such locks either.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._input, self._output, self._files = process.stdin, process.stdout, files

    def begin(self, description: Mapping[str, Any], lock: BinaryIO) -> None:
        """Before the first file.

        ``description``: that of the job, which the process must come to as well. ``lock``: an open file of this
        process, which the other one keeps open too.
        """
        if self._files is not None:
            with suppress(OSError):  # it has ended, which is found when it doesn't answer
                socket.send_fds(self._files, [b"."], [lock.fileno()])
        self.send({"description": description})

    def write_shard(
        self,
        file: BinaryIO,
        names: list[str],
        done: Callable[[int], object],
        begun: Begun,
        note: Callable[[Begun], object],
        metadata: Mapping[str, str],
    ) -> dict[str, float]:
        """What ``shards.write_shard`` does, in the process.

        ``file`` must have a name, by which the process opens it. Raises ``WorkerError`` if the process ends, or for an
        error that isn't a ``CheckpointError`` or an ``OSError``, which are raised as they are.
        """
        self.send({"file": file.name, "names": names, "begun": asdict(begun), "metadata": dict(metadata)})
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
        """Sends the process a message; that it has ended is found when it doesn't answer."""
        with suppress(OSError):
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

    def stop(self) -> None:
        """Ends the process, which leaves what it writes as it is."""
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
def started_worker(job: Job, device: torch.device) -> Iterator[Worker]:
    """A process that quantizes on ``device``, until the block is left; it makes its plan of ``job`` meanwhile."""
    worker = Worker(*start_process())
    try:
        worker.send({"job": job.to_dict(), "device": str(device)})
        yield worker
    finally:
        worker.stop()


def start_process() -> tuple[subprocess.Popen[bytes], socket.socket | None]:
    """Starts a Python that runs ``serve_caller``; also returns what gives it open files."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    if os.name != "posix":
        return subprocess.Popen([*command, "-1"], **pipes), None
    files, theirs = socket.socketpair()
    with theirs:
        return subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], **pipes), files


def serve_caller(files: int) -> None:
    """What a worker process does: files are asked for through its standard input, until that is closed.

    ``files``: the descriptor of the socket through which open ones come, or -1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer

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
    os._exit(0)  # the caller has ended, or needs nobody any more


def _work(receive: Callable[[], dict[str, Any]], answer: Callable[..., object], files: int) -> None:
    first = receive()
    job, device = Job.from_dict(first["job"]), torch.device(first["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or the first GPU would hold something of every process
    with open_source(job.source) as opened:
        plan = _plan(job, opened, lambda: receive()["description"])
        if files >= 0:
            with socket.socket(fileno=files) as given:
                socket.recv_fds(given, 1, 1)  # the lock's file, which stays open until this process ends
        while True:
            _write(plan, device, receive(), answer)


def _plan(job: Job, opened: Source, wanted: Callable[[], Mapping[str, Any]]) -> CheckpointPlan:
    """The plan of ``job``; raises ``CheckpointError`` if it is another one than the caller's, ``wanted()``."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # the caller has said it all
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = job.plan(opened)
        found = json.loads(json.dumps(job.describe(opened, plan)))
        expected = wanted()
        different = [f"it finds another {key}" for key, value in found.items() if value != expected.get(key)]
    except (CheckpointError, ValueError) as error:
        different = [str(error)]
    if different:
        raise CheckpointError(
            f"a worker process doesn't come to the plan for {job.source} that this one has: {different[0]}. If this "
            "program changes qgemm or transformers, by registering a model for example, pass workers=1"
        )
    return plan


def _write(plan: CheckpointPlan, device: torch.device, wanted: dict[str, Any], answer: Callable[..., object]) -> None:
    path, begun = Path(wanted["file"]), parse_begun(wanted["begun"])

    def note(begun: Begun) -> None:
        file.flush()  # the caller sees to it that it reaches the disk
        answer(begun=asdict(begun))

    with path.open("r+b") as file:
        told = partial(_tell, answer)
        errors = write_shard(file, plan, wanted["names"], device, told, begun, note, wanted["metadata"])
    answer(errors=errors)


def _tell(answer: Callable[..., object], count: int) -> None:
    answer(done=count)


def _raise(kind: str, number: int | None, said: str, trace: str) -> None:
    if kind == "checkpoint":
        raise CheckpointError(said)
    if kind == "system":
        raise OSError(number, said)
    raise WorkerError(f"a worker process failed: {said}") from WorkerError(trace)
