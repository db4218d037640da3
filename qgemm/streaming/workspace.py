"""The folder beside the destination in which a run does its work, and from which a later run goes on.

``<destination>.partial`` holds ``content``, the files that are done, and ``journal.json``, which says which those are
and what is being made. The journal is replaced as a whole after each file, so a process may be killed at any moment.
When all is there, ``content`` is renamed to the destination, which so appears whole, and the rest is removed.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from qgemm.checkpoint.checksum import RunningChecksum, format_checksum
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import read_json
from qgemm.checkpoint.safetensors_file import CHECKSUMS
from qgemm.streaming.source import read_layout

_JOURNAL = "journal.json"
_CONTENT = "content"
_LOCK = "lock"
_UNFINISHED = ".unfinished"
_BYTES_AT_A_TIME = 16 << 20


def partial_folder(destination: Path) -> Path:
    """Where the files for a destination are until all are done."""
    return destination.with_name(destination.name + ".partial")


@dataclass(frozen=True)
class Finished:
    """A file that is done: what it is known by, and the errors of the weights in it, by layer."""

    fingerprint: str
    errors: dict[str, float]


class Workspace:
    """Where the files for a destination are made. ``open_workspace`` opens one."""

    def __init__(self, destination: Path, job: dict[str, Any]) -> None:
        """``job``: JSON-ready values that say what is being made of what."""
        self.destination = destination
        self.folder = partial_folder(destination)
        self.content = self.folder / _CONTENT
        self.finished: dict[str, Finished] = {}
        self._job: dict[str, Any] = json.loads(json.dumps(job))

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Opens a new file, which gets its name, a path within the folder, once it is whole and on the disk."""
        path = self.content / name
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_name(path.name + _UNFINISHED)
        try:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    def note_finished(self, name: str, errors: dict[str, float]) -> None:
        """Puts into the journal that the file ``name`` is done."""
        self.finished[name] = Finished(_fingerprint(self.content / name), errors)
        self._write_journal()

    def publish(self) -> None:
        """Renames what is done to the destination."""
        _sync_folder(self.content)
        if self.destination.exists():
            self.destination.rmdir()  # it is empty; Windows doesn't rename onto a folder
        os.rename(self.content, self.destination)
        _sync_folder(self.destination.parent)
        shutil.rmtree(self.folder, ignore_errors=True)

    def clear(self) -> None:
        """Removes what an earlier run did."""
        shutil.rmtree(self.content, ignore_errors=True)
        (self.folder / _JOURNAL).unlink(missing_ok=True)

    def recover(self, names: Collection[str], read: Callable[[int], object]) -> None:
        """Finds those of the files called ``names`` that an earlier run finished, and checks that they are as written.

        ``read`` is told the bytes that were read. Raises ``CheckpointError`` if the earlier run made something else.
        """
        journal_path = self.folder / _JOURNAL
        if journal_path.exists():
            try:
                journal = read_json(journal_path)
            except CheckpointError as error:
                raise CheckpointError(f"{error}. Pass resume=False to start afresh") from error
            self._check_job(journal.get("job"))
            for name, entry in _entries(journal, journal_path).items():
                if name not in names:
                    continue
                if _is_sound(self.content / name, entry.fingerprint, read):
                    self.finished[name] = entry
                else:
                    warnings.warn(f"{self.content / name} isn't as it was written; it is made again", stacklevel=3)
        self.content.mkdir(exist_ok=True)
        for path in self.content.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in self.finished:
                path.unlink()
        self._write_journal()

    def _check_job(self, job: Any) -> None:
        before = job if isinstance(job, dict) else {}
        for key, value in self._job.items():
            if before.get(key) != value:
                change = _change(before.get(key), value)
                raise CheckpointError(
                    f"{self.folder} holds the beginnings of something else: {key} {change}. Give what was given then, "
                    "to go on with that, or pass resume=False to start afresh"
                )

    def _write_journal(self) -> None:
        finished = {name: {"fingerprint": f.fingerprint, "errors": f.errors} for name, f in self.finished.items()}
        path = self.folder / _JOURNAL
        unfinished = path.with_name(path.name + _UNFINISHED)
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump({"job": self._job, "finished": finished}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        _sync_folder(self.folder)


@contextmanager
def open_workspace(destination: Path, job: dict[str, Any]) -> Iterator[Workspace]:
    """The workspace for ``destination``, for this process alone.

    What is in it stays if an error leaves the block. Raises ``FileExistsError`` if the destination exists and isn't
    empty, and ``CheckpointError`` if another process is at it.
    """
    if os.path.lexists(destination):
        if not destination.is_dir() or destination.is_symlink() or any(destination.iterdir()):
            raise FileExistsError(f"{destination} exists already: choose another destination, or remove it")
        if os.path.ismount(destination):
            raise FileExistsError(f"{destination} is a mounted disk: choose a folder in it as the destination")
    workspace = Workspace(destination, job)
    folder = workspace.folder
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in folder.iterdir()}
    if names and not names & {_JOURNAL, _LOCK}:
        raise FileExistsError(f"{folder} is in the way, and not a folder that qgemm made: move it")
    with (folder / _LOCK).open("ab") as lock:
        _lock(lock, folder)
        yield workspace


def _lock(file: BinaryIO, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows, where nothing keeps two processes apart
        return
    try:
        # It ends with the process, however that ends.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another process works in {folder}: wait for it, or choose another destination"
        ) from error


def _entries(journal: dict[str, Any], path: Path) -> dict[str, Finished]:
    try:
        return {
            name: Finished(
                str(values["fingerprint"]), {layer: float(error) for layer, error in values["errors"].items()}
            )
            for name, values in journal["finished"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: pass resume=False to start afresh") from error


def _fingerprint(path: Path) -> str:
    layout = read_layout(path)
    return f"{layout.size} {layout.digest}"


def _is_sound(path: Path, fingerprint: str, read: Callable[[int], object]) -> bool:
    """Whether a file is the one with that fingerprint, and its values have the checksums in its header."""
    try:
        if _fingerprint(path) != fingerprint:
            return False
        layout = read_layout(path)
        checksums = json.loads(layout.header["__metadata__"][CHECKSUMS])
        with path.open("rb") as file:
            for name, (start, end) in _places(layout.header):
                if format_checksum(_sum(file, layout.begin + start, end - start, read)) != checksums[name]:
                    return False
    except (CheckpointError, OSError, KeyError, TypeError, ValueError):
        return False
    return True


def _places(header: dict[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, values in header.items():
        if name != "__metadata__":
            yield name, values["data_offsets"]


def _sum(file: BinaryIO, start: int, size: int, read: Callable[[int], object]) -> int:
    total = RunningChecksum()
    buffer = bytearray(min(size, _BYTES_AT_A_TIME))
    file.seek(start)
    left = size
    while left:
        part = memoryview(buffer)[: min(left, len(buffer))]
        if file.readinto(part) != len(part):  # type: ignore[attr-defined]
            raise OSError("the file is too short")
        total.add(torch.frombuffer(part, dtype=torch.uint8))
        left -= len(part)
        read(len(part))
    return total.value


def _change(before: Any, now: Any) -> str:
    text = f"was {before!r}, is {now!r}"
    return text if len(text) <= 100 else "is another now"


def _sync_folder(folder: Path) -> None:
    # So that renames are on the disk. Windows can't open a folder.
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
