"""The folder beside the destination in which a run works, and from which a later run continues.

``<destination>.partial`` contains ``content``, with finished files and those being written, and ``journal.json``, which
records the progress. What the journal describes is on the disk before the journal is, and the journal is replaced as a
whole, so a kill or a power failure is safe at any moment. When all files are finished, ``content`` is renamed to the
destination, which thus appears complete, and the rest is removed.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from qgemm.checkpoint.checksum import checksum_in_file, format_checksum
from qgemm.checkpoint.disk import lock_file, make_folder, open_regular, replacing, sync_file, sync_folder
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import CHECKSUMS
from qgemm.checkpoint.safetensors_reader import SafetensorsReader
from qgemm.streaming.journal import Begun, Finished, Journal
from qgemm.warn import warn_user

_JOURNAL = "journal.json"
_CONTENT = "content"
_LOCK = "lock"


def partial_folder(destination: Path) -> Path:
    """The folder for a destination's files until all are finished."""
    return destination.with_name(destination.name + ".partial")


class Workspace:
    """The work on the files for a destination. ``open_workspace`` opens one.

    Several threads may each open a shard and record its progress.
    """

    def __init__(self, destination: Path, job: dict[str, Any], lock: BinaryIO) -> None:
        """``job``: JSON-ready values that identify what is converted to what. ``lock``: the locked file."""
        self.destination = destination
        self.folder = partial_folder(destination)
        self.content = self.folder / _CONTENT
        self.finished: dict[str, Finished] = {}
        self.begun: dict[str, Begun] = {}
        self.lock = lock
        self._noting = threading.Lock()
        self._job: dict[str, Any] = json.loads(json.dumps(job))

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Opens a new file, which gets its name, a path within the folder, when it is complete and on the disk."""
        path = self.content / name
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as file:
            yield file

    @contextmanager
    def open_shard(self, name: str) -> Iterator[tuple[BinaryIO, Begun]]:
        """Opens a shard; also gives an earlier run's progress. After a failure, it stays if progress was recorded."""
        path = self.content / name
        begun = self.begun.get(name)
        try:
            with path.open("r+b" if begun else "w+b") as file:
                yield file, begun or Begun(name)
                sync_file(file)
        except BaseException:
            if name not in self.begun:
                with suppress(OSError):  # the original error matters more
                    path.unlink()
            raise
        sync_folder(self.content)

    def note_begun(self, begun: Begun, file: BinaryIO) -> None:
        """Records the progress of a shard in the journal; ``file`` is the shard's open file."""
        sync_file(file)
        sync_folder(self.content)
        with self._noting:
            self.begun[begun.name] = begun
            self._write_journal()

    def note_finished(self, name: str, errors: dict[str, float]) -> None:
        """Records in the journal that the file ``name`` is finished."""
        with SafetensorsReader(self.content / name) as reader:
            finished = Finished(_fingerprint(reader), errors)
        with self._noting:
            self.finished[name] = finished
            self.begun.pop(name, None)
            self._write_journal()

    def publish(self) -> None:
        """Renames the finished content to the destination."""
        sync_folder(self.content)
        check_is_free(self.destination)
        if os.name == "nt" and self.destination.exists():
            self.destination.rmdir()  # it is empty, and Windows can't rename onto an existing folder
        os.rename(self.content, self.destination)
        try:
            sync_folder(self.destination.parent)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def clear(self) -> None:
        """Removes an earlier run's work."""
        (self.folder / _JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(self.content, ignore_errors=True)

    def recover(self, names: Collection[str], read: Callable[[int], object]) -> None:
        """Finds those of the files ``names`` that an earlier run finished or began.

        Finished ones are verified to be as they were written. ``read`` is called with the number of bytes read. Raises
        ``CheckpointError`` if the earlier run converted something else.
        """
        # Without content there is nothing to continue from: it was published, and then removed.
        if (self.folder / _JOURNAL).exists() and self.content.is_dir():
            journal = Journal.read(self.folder / _JOURNAL)
            self._check_job(journal.job)
            for name, entry in journal.finished.items():
                if name not in names:
                    continue
                if _is_sound(self.content / name, entry.fingerprint, read):
                    self.finished[name] = entry
                else:
                    warn_user(f"{self.content / name} differs from what was written, so it is made again")
            left = [name for name in journal.begun if name in names and name not in self.finished]
            self.begun = {name: journal.begun[name] for name in left if (self.content / name).is_file()}
        self.content.mkdir(exist_ok=True)
        kept = {*self.finished, *self.begun}
        for path in self.content.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in kept:
                path.unlink()
        self._write_journal()

    def _check_job(self, job: Any) -> None:
        before = job if isinstance(job, dict) else {}
        for key, value in self._job.items():
            if before.get(key) != value:
                change = f"was {before.get(key)!r}, is {value!r}"
                change = change if len(change) <= 100 else "is another now"
                raise CheckpointError(
                    f"{self.folder} holds another, unfinished run: {key} {change}. Use the arguments of that run "
                    "to resume it, or pass resume=False to start over"
                )

    def _write_journal(self) -> None:
        Journal(self._job, self.finished, self.begun).write(self.folder / _JOURNAL)


@contextmanager
def open_workspace(destination: Path, job: dict[str, Any]) -> Iterator[Workspace]:
    """Opens the workspace for ``destination``, for this process alone.

    Its content stays if an error leaves the block. Raises ``FileExistsError`` if the destination exists and isn't
    empty, and ``CheckpointError`` if another process is using the workspace.
    """
    with open_work_folder(partial_folder(destination), destination) as lock:
        yield Workspace(destination, job, lock)


@contextmanager
def open_work_folder(folder: Path, destination: Path) -> Iterator[BinaryIO]:
    """Makes ``folder``, in which a process works on ``destination``, if it is missing; yields its file with the lock.

    Raises ``FileExistsError`` if the destination exists and isn't empty, or if the folder isn't such a one, and
    ``CheckpointError`` if another process is using it.
    """
    check_is_free(destination)
    if not os.path.lexists(folder):
        make_folder(folder)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    if names and not names & {_JOURNAL, _LOCK}:
        raise FileExistsError(f"{folder} exists, and isn't a folder that qgemm made: move it")
    with (folder / _LOCK).open("ab") as lock:
        if not lock_file(lock):
            raise CheckpointError(f"another process uses {folder}: wait for it, or choose another destination")
        sync_folder(folder)  # so that a later run knows whose folder it is, even if other content is lost
        check_is_free(destination)  # again, because another process may just have finished
        yield lock


def check_is_free(destination: Path) -> None:
    """Raises ``FileExistsError`` unless ``destination`` is missing, or an empty folder that can be replaced."""
    if os.path.lexists(destination):
        if not destination.is_dir() or destination.is_symlink() or any(destination.iterdir()):
            raise FileExistsError(f"{destination} exists already: choose another destination, or remove it")
        if os.path.ismount(destination):
            raise FileExistsError(f"{destination} is a mounted disk: choose a folder in it as the destination")


def _fingerprint(reader: SafetensorsReader) -> str:
    return f"{reader.stamp.size} {reader.digest}"


def _is_sound(path: Path, fingerprint: str, read: Callable[[int], object]) -> bool:
    try:
        with SafetensorsReader(path) as reader, open_regular(path) as file:
            if _fingerprint(reader) != fingerprint:
                return False
            checksums = json.loads(reader.metadata[CHECKSUMS])
            for name, place in reader.places.items():
                found = checksum_in_file(file, place.start, place.stop - place.start, read)
                if format_checksum(found.value) != checksums[name]:
                    return False
    except (CheckpointError, OSError, KeyError, TypeError, ValueError):
        return False
    return True
