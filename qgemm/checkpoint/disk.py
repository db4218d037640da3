"""Files on a disk: reads only regular ones, and replaces files in one step.

A new file gets its name when it is complete and on the disk, by one rename, so that there is either the old file or the
new one at every moment: even if the disk is full, the process is killed, or the power fails.
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

# Windows has no O_NONBLOCK, and would read in text mode.
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
    """Raises ``CheckpointError`` for anything but a regular file, links followed, and ``OSError`` if nothing is there.

    Opening a pipe would wait for a writer, and a device has no end.
    """
    _check_kind(path, os.stat(path))


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. Links are followed; ``layout.checkpoint_file`` limits where they may lead.

    Raises ``CheckpointError`` for anything but a regular file, and ``OSError`` as ``open`` does.
    """
    check_regular(path)  # before opening, because opening triggers some devices
    # If a pipe takes the file's place at this moment, O_NONBLOCK opens it without waiting.
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
    """Turns any ``OSError`` inside into a ``CheckpointError``, where the file at ``path`` is read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Adds ``folder`` to any ``OSError`` inside that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(folder)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file, which replaces the one at ``path``, if there is one, at the end of the block.

    It is then complete and on the disk. An error leaves the old file unchanged. Leftovers of writers that were killed
    are removed; several writers may work at a time, and the last one to finish determines the file.
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
            # It stays locked until it has its name. Windows has no such locks, and can't rename open files.
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
        # Until it is locked, another process may take it for a leftover and remove it.
        if lock_file(file) and os.path.exists(file.name):
            return file
        file.close()


def unfinished_path(path: Path) -> Path:
    """An unused temporary name for the file that will be at ``path``, which ``remove_unfinished`` recognizes."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, and waits until they are on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


@contextmanager
def making_folder(folder: Path) -> Iterator[None]:
    """As ``make_folder``; a folder that was missing is removed again if an exception leaves it empty."""
    is_new = not folder.exists()
    make_folder(folder)
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def sync_file(file: BinaryIO) -> None:
    """Waits until everything written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the names in ``folder`` are on the disk; without it, renames may reach the disk in any order.

    Windows can't open a folder, and orders them itself.
    """
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Removes what ``replacing`` left behind in killed processes, but nothing that another process works on.

    ``name``: the file that was to be replaced; if empty, leftovers of all files are removed.
    """
    for path in folder.iterdir():
        found = _UNFINISHED.fullmatch(path.name)
        if found is not None and name in ("", found[1]):
            with suppress(OSError, CheckpointError), open_regular(path) as file:
                if lock_file(file):
                    path.unlink()


def forget_bytes(file: BinaryIO, start: int, count: int) -> None:
    """Tells the system that these bytes won't be read again, so that they displace no others from its cache."""
    if hasattr(os, "posix_fadvise"):  # on Linux
        with suppress(OSError):  # it is only advice, and some file systems don't support it
            os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)


def lock_file(file: BinaryIO) -> bool:
    """Locks an open file until it is closed, also by a kill; returns False if somebody else holds the lock.

    Where there are no locks, on Windows and some network disks, it always succeeds.
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
