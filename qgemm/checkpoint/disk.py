"""Files on a disk: read if they are regular ones, replaced in one step.

A file that is written gets its name when it is whole and on the disk, by one rename, so that there is the old one or
the new one at every moment: when the disk is full, when the process is killed, when the power goes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from qgemm.checkpoint.errors import CheckpointError

# Windows has no O_NONBLOCK, and would read text.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_UNFINISHED = re.compile(r"\.(.+)\.tmp-[0-9a-f]{8}", re.DOTALL)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path) -> None:
    """Raises ``CheckpointError`` for what is no regular file, links followed, and ``OSError`` if there is nothing.

    To open a pipe is to wait for somebody who writes, and a device has no end.
    """
    _check_kind(path, os.stat(path))


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read it. Links are followed; ``layout.checkpoint_file`` says to where they may lead.

    Raises ``CheckpointError`` for what is no regular file, and ``OSError`` as ``open`` does.
    """
    check_regular(path)  # first, since some devices act when they are opened
    # A pipe that takes the file's place just now is opened without waiting.
    descriptor = os.open(path, _READ)
    try:
        _check_kind(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_kind(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointError(f"{path} is {kind}; only regular files are read")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Makes a ``CheckpointError`` of any ``OSError`` inside, where the file at ``path`` is read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Says of any ``OSError`` inside that names no file, as one of a full disk, that it was in ``folder``."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(folder)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file, which takes the place of the one at ``path``, if there is one, when the block is left.

    It is then whole and on the disk. An error leaves the old file as it was. What a writer that was killed left behind
    is removed; several may write at a time, and the last one to finish has its file there.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "there is a folder with this name", str(path))
    remove_unfinished(path.parent, path.name)
    file = _create_unfinished(path)
    unfinished = Path(file.name)
    try:
        with file:
            yield file
            sync_file(file)
            # It stays locked until it has its name. Windows, which has no such locks, renames no open file.
            if os.name != "posix":
                file.close()
            os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync_folder(path.parent)


def _create_unfinished(path: Path) -> BinaryIO:
    while True:
        file = unfinished_path(path).open("xb")
        # Another process may take it for one that was left behind, until it is locked.
        if lock_file(file) and os.path.exists(file.name):
            return file
        file.close()


def unfinished_path(path: Path) -> Path:
    """Another name, which no file has, for the file that is to be at ``path``; ``remove_unfinished`` knows it."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, where there are none yet, so that they are on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_file(file: BinaryIO) -> None:
    """Waits until all that was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the names in ``folder`` are on the disk: renames reach it in their order only if it's synced between.

    Windows can't open a folder, and orders them by itself.
    """
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Removes what ``replacing`` left in processes that were killed, and nothing that another one works on.

    ``name``: of the file that was to be replaced; all of them, without.
    """
    for path in folder.iterdir():
        found = _UNFINISHED.fullmatch(path.name)
        if found is not None and name in ("", found[1]):
            with suppress(OSError, CheckpointError), open_regular(path) as file:
                if lock_file(file):
                    path.unlink()


def forget_bytes(file: BinaryIO, start: int, count: int) -> None:
    """Tells the system that nobody reads these bytes again, so that they displace no others from its memory."""
    if hasattr(os, "posix_fadvise"):  # on Linux
        with suppress(OSError):  # advice, which some file systems don't take
            os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)


def lock_file(file: BinaryIO) -> bool:
    """Takes the lock of an open file, which ends as it is closed, also by a kill; False if somebody else has it.

    Where there are no locks, on Windows and some network disks, everybody gets it.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True
