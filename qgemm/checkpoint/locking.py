"""The lock that lets only one process at a time save into a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qgemm.checkpoint.disk import lock_file
from qgemm.checkpoint.errors import CheckpointError

LOCK_FILE = ".qgemm.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other process or thread holds the lock of ``folder``; raises ``CheckpointError`` if one does.

    The lock ends with the process, however that ends. Windows has no such locks, nor have some network disks: there,
    nothing keeps two savers apart.
    """
    path = folder / LOCK_FILE
    while True:
        file = path.open("ab")
        if not lock_file(file):
            file.close()
            raise CheckpointError(f"another process is saving into {folder}: wait for it, then save again")
        # The previous holder may just have removed the file; then this lock protects nothing.
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                break
        file.close()
    with file:
        try:
            yield
        finally:
            with suppress(OSError):  # Windows can't remove an open file
                path.unlink()
