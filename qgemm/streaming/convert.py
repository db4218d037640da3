"""``quantize_checkpoint``: quantizes a folder of float weights to another folder, using little memory."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

from qgemm.arguments import as_new_folder, as_path, shown
from qgemm.calibration.quantization import Quantization
from qgemm.calibration.result import Calibration, check_has_statistics
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.save import Save
from qgemm.device import find_device, no_garbage_collection, one_thread
from qgemm.model.report import QuantReport
from qgemm.model.selection import Patterns, SchemeChoice
from qgemm.streaming.companions import copy_companion, find_companions_to_copy
from qgemm.streaming.journal import Begun
from qgemm.streaming.plan import CheckpointPlan, describe_job, most_files, plan_checkpoint
from qgemm.streaming.shard_plan import ShardPlan
from qgemm.streaming.shards import write_shard
from qgemm.streaming.source import Source, open_source
from qgemm.streaming.workers import Worker, WorkerError, started_worker
from qgemm.streaming.workspace import Workspace, open_workspace, partial_folder
from qgemm.warn import warn_user


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    scheme: SchemeChoice = "int8",
    *,
    skip: Patterns = None,
    include: Patterns = None,
    input_scales: Mapping[str, float | Tensor] | None = None,
    calibration: Calibration | None = None,
    drop: str | Iterable[str] = (),
    device: torch.device | str = "cpu",
    max_shard_size: int | str = "5GB",
    workers: int = 1,
    resume: bool = True,
    progress: bool | None = None,
) -> QuantReport:
    """Quantizes the checkpoint of a transformers model from files to files, without building the model.

    Writes to the new folder ``destination`` the same files, bit for bit, as ``from_pretrained(source)``,
    ``quantize_model`` and ``save_quantized``, and copies other files in ``source``, such as the tokenizer; returns the
    report. Only a few rows of a weight, or one expert, are in memory at a time.

    - ``source``: a folder with ``config.json`` and safetensors files with float weights.
    - ``scheme``, ``skip``, ``include``, ``input_scales``: as in ``quantize_model``.
    - ``calibration``: instead of ``input_scales``, the statistics that ``qgemm.calibrate`` has collected.
    - ``drop``: names or globs of tensors to ignore, which the model doesn't have.
    - ``device``: where weights are quantized, a part at a time. With several workers, ``"cuda"`` means all GPUs,
      assigned to the workers in turn.
    - ``max_shard_size``: the maximum size of a file, in bytes or as text such as ``"5GB"``.
    - ``workers``: how many processes write files at the same time, including this one. The files are the same.
    - ``resume``: whether to continue an interrupted run that had the same arguments. Its work is in
      ``<destination>.partial``; finished parts are verified and kept. False starts over.
    - ``progress``: whether to show a progress bar; None shows one on a terminal only.

    Each process uses one PyTorch thread: pieces are small, and threads that wait for one another on busy cores take
    many times as long.

    Raises ``CheckpointError`` for a source that is damaged, already quantized, a pickle, or doesn't match transformers'
    class of the model, and for one that changes during the run; ``ValueError`` as ``quantize_model`` does, and for a
    device that doesn't exist; ``FileExistsError`` if ``destination`` isn't empty; ``OSError`` if the disk is full or
    can't be written; ``RuntimeError`` if a worker process fails or is killed. ``destination`` is then unchanged.
    ``KeyboardInterrupt`` tells the progress and the folder.
    """
    wanted = Quantization.of(scheme, skip=skip, include=include, input_scales=input_scales)
    _check_calibration(wanted, calibration)
    source, destination = as_path("source", source), as_new_folder("destination", destination).absolute()
    devices = _devices(device, workers)
    dropped = _names(drop)
    # Measured on two cores with 0.4 GB in bfloat16: 1.3 s with one thread or two; with busy cores, 9 s with one thread,
    # and over 100 s with two, mostly spent waiting at the end of each operation.
    with one_thread(), open_source(source) as opened, ExitStack() as processes:
        # The workers start in less time than this process needs for its plan.
        elsewhere = devices[1 : most_files(opened, max_shard_size)]
        others = [processes.enter_context(started_worker(source.absolute(), dropped, each)) for each in elsewhere]
        with no_garbage_collection():  # which takes a fifth of the time to import transformers
            plan = plan_checkpoint(opened, wanted, dropped, max_shard_size, calibration)
        if workers > len(plan.shards):
            warn_user(
                f"workers is {workers}, and there are {len(plan.shards)} files to write, each by one process: pass a "
                f"smaller max_shard_size than {max_shard_size!r}, so that all of them have work"
            )
        companions = find_companions_to_copy(source)
        description = describe_job(opened, plan, wanted, max_shard_size, has_calibration=calibration is not None)
        with _explained(destination, resume), open_workspace(destination, description) as workspace:
            if not resume:
                workspace.clear()
            # Derived from the job, so that a run that continues another one's work gives its files the same id.
            save = Save(hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16])
            with _watched(opened, workspace), _interruptible(plan, workspace, resume):
                with _prepared(plan, workspace, progress) as update:
                    shards = _Shards(opened, plan, workspace, save.metadata, update)
                    _write_shards(shards, devices[0], others, workspace.lock)
                errors = {layer: e for file in workspace.finished.values() for layer, e in file.errors.items()}
                _write_others(plan.text_files(errors, save), source, companions, workspace)
                opened.check_unchanged(digests=True)
                workspace.publish()
    return plan.report(errors)


def _check_calibration(wanted: Quantization, calibration: Any) -> None:
    """Raises ``TypeError`` and ``ValueError`` for problems that show before files are read."""
    if calibration is None:
        return
    if not isinstance(calibration, Calibration):
        raise TypeError(
            f"calibration is {shown(calibration)}, and quantize_checkpoint runs no model: pass a Calibration, or load "
            "the float model, and pass it to quantize_model with batches"
        )
    wanted.check_data(calibration)
    check_has_statistics(filter(None, wanted.schemes.values()))


@contextmanager
def _prepared(plan: CheckpointPlan, workspace: Workspace, progress: bool | None) -> Iterator[Callable[[int], object]]:
    """Finds what is already finished; yields the function that advances the progress bar, which is shown inside."""
    hide = None if progress is None else not progress
    with tqdm(desc="verify", unit="B", unit_scale=True, disable=hide, leave=False) as bar:
        workspace.recover(plan.shards, bar.update)
    _check_room(plan, workspace)
    done, total = _done(plan, workspace), sum(plan.bytes_to_read.values())
    with tqdm(total=total, initial=done, desc="quantize", unit="B", unit_scale=True, disable=hide) as bar:
        yield bar.update


def _done(plan: CheckpointPlan, workspace: Workspace) -> int:
    """The number of bytes of float values that the finished files are made from."""
    return sum(plan.bytes_to_read[file_name] for file_name in workspace.finished)


class _Shards:
    """The unfinished files, each of which one of several threads takes and writes."""

    def __init__(
        self,
        source: Source,
        plan: CheckpointPlan,
        workspace: Workspace,
        metadata: Mapping[str, str],
        update: Callable[[int], object],
    ) -> None:
        """``metadata``: as for ``write_shard``. ``update`` gets the number of bytes of float values processed."""
        left = (file_name for file_name in plan.shards if file_name not in workspace.finished)
        # The largest first, because at the end all others wait for the thread with the last file.
        self.left = sorted(left, key=lambda file_name: -plan.bytes_to_read[file_name])
        self.failure: BaseException | None = None
        self._source, self._plan, self._workspace, self._metadata = source, plan, workspace, metadata
        self._update = update
        self._lock = threading.Lock()

    def write(self, write: Callable[..., dict[str, float]]) -> None:
        """Writes files until none is left, or another thread has failed.

        ``write``: ``write_shard`` without its ``device``.
        """
        try:
            # The next file is made while the previous one is forced to the disk.
            with ThreadPoolExecutor(1) as behind:
                finished: Future[None] | None = None
                while (file_name := self._take()) is not None:
                    with ExitStack() as opened:
                        file, begun = opened.enter_context(self._workspace.open_shard(file_name))
                        note = partial(self._note, file)
                        errors = write(file, self._plan.shard(file_name), self._done, begun, note, self._metadata)
                        if finished is not None:
                            finished.result()
                        finished = behind.submit(self._finish, opened.pop_all(), file_name, errors)
                if finished is not None:
                    finished.result()
        except _Abandoned:
            return
        except BaseException as error:
            with self._lock:
                self.failure = self.failure or error
            raise

    def _finish(self, opened: ExitStack, file_name: str, errors: dict[str, float]) -> None:
        """Waits until the file that was ``opened`` is on the disk, and notes that it is finished."""
        opened.close()
        self._source.check_unchanged()
        self._workspace.note_finished(file_name, errors)

    def _take(self) -> str | None:
        with self._lock:
            return self.left.pop(0) if self.left and self.failure is None else None

    def _done(self, count: int) -> None:
        if self.failure is not None:
            raise _Abandoned
        with self._lock:
            self._update(count)

    def _note(self, file: BinaryIO, begun: Begun) -> None:
        self._source.check_unchanged()  # so that the journal describes nothing made from a changed source
        self._workspace.note_begun(begun, file)


class _Abandoned(Exception):
    """Another thread has failed, and reports the reason."""


def _write_shards(shards: _Shards, device: torch.device, workers: list[Worker], lock: BinaryIO) -> None:
    """Writes the files that are left, on ``device`` in this process, and in the ``workers``, which are then stopped.

    ``lock``: the file whose lock the workers hold meanwhile.
    """
    count = max(0, len(shards.left) - 1)
    for worker in workers[count:]:  # no file is left for these
        worker.stop()
    workers = workers[:count]
    for worker in workers:
        worker.begin(lock)

    def write_here(file: BinaryIO, shard: ShardPlan, *others: Any) -> dict[str, float]:
        return write_shard(file, shard, device, *others)

    with ThreadPoolExecutor(1 + len(workers)) as threads:
        try:
            written = [threads.submit(shards.write, worker.write_shard) for worker in workers]
            shards.write(write_here)
            wait(written, return_when=FIRST_EXCEPTION)
            if shards.failure is not None:
                raise shards.failure
        finally:  # before waiting for the threads, which wait for the workers
            for worker in workers:
                worker.stop()


def _write_others(texts: Mapping[str, bytes], source: Path, companions: Iterable[Path], workspace: Workspace) -> None:
    """Writes the checkpoint's JSON files, and copies those beside the weights in ``source``."""
    for name, text in texts.items():
        with workspace.create(name) as file:
            file.write(text)
    for path in companions:
        with workspace.create(str(path)) as file:
            copy_companion(source / path, file)


def _devices(device: torch.device | str, workers: int) -> list[torch.device]:
    """The device on which each process quantizes."""
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise TypeError(f"workers is {shown(workers)}; it must be a number of processes, 1 or more")
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be a number of processes, 1 or more")
    first = find_device(device)
    if first.type != "cuda" or torch.device(device).index is not None:
        return [first] * workers
    return [torch.device("cuda", (first.index + each) % torch.cuda.device_count()) for each in range(workers)]


def _check_room(plan: CheckpointPlan, workspace: Workspace) -> None:
    names = (name for file, names in plan.shards.items() if file not in workspace.finished for name in names)
    needed = sum(plan.tensors[name].nbytes for name in names)
    needed -= sum(size for begun in workspace.begun.values() for size, _ in begun.written.values())
    free = shutil.disk_usage(workspace.folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes must still be written, but the disk has only {free:,} free")


@contextmanager
def _watched(source: Source, workspace: Workspace) -> Iterator[None]:
    """Reports that the source was changed, whatever else went wrong because of that."""
    try:
        yield
    except CheckpointError as error:
        if (change := source.find_change(digests=True)) is None:
            raise
        raise CheckpointError(
            f"{source.folder} was changed while it was read: {change}. Nothing was published. The partial result is in "
            f"{workspace.folder} and belongs to the old files: when no process writes to them, pass resume=False "
            "to start over"
        ) from error


@contextmanager
def _interruptible(plan: CheckpointPlan, workspace: Workspace, resume: bool) -> Iterator[None]:
    """On an interrupt, tells the progress, and how to continue."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not workspace.content.exists():  # it is already published
            raise
        done = _done(plan, workspace) + sum(begun.read for begun in workspace.begun.values())
        share = done / max(1, sum(plan.bytes_to_read.values()))
        raise KeyboardInterrupt(
            f"{share:.0%} of the work is done, and kept in {workspace.folder}; {_goes_on(resume)}"
        ) from interrupt


@contextmanager
def _explained(destination: Path, resume: bool) -> Iterator[None]:
    """Explains in one sentence what happens to a run whose disk is full or can't be written, or whose worker ends."""
    try:
        yield
    except FileExistsError:
        raise
    except WorkerError as error:
        raise RuntimeError(
            f"{error}. What is finished is kept in {partial_folder(destination)}; {_goes_on(resume)}"
        ) from error
    except OSError as error:
        said = error.strerror or error
        if destination.is_dir() and any(destination.iterdir()):
            said = f"{destination} is whole, but the system couldn't see its name safely to the disk: {said}"
        else:
            said = f"{destination} can't be written: {said}"
            if (partial := partial_folder(destination)).exists():
                said += f". What is finished is kept in {partial}; {_goes_on(resume)}"
        raise OSError(error.errno, said) from error


def _goes_on(resume: bool) -> str:
    return f"run the same again{'' if resume else ', but with resume,'} to continue from there"


def _names(drop: str | Iterable[str]) -> list[str]:
    names = [drop] if isinstance(drop, str) else list(drop) if isinstance(drop, Iterable) else [drop]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"drop holds {name!r}; it takes names and globs of tensors")
    return names
