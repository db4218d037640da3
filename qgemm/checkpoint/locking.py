"""One process at a time: the lock that whoever saves into a folder holds."""

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
    """Inside, no other process, or thread, is inside for the same ``folder``; raises ``CheckpointError`` if one is.

    The lock ends with the process, however that ends. Windows has none of the kind, nor have some network disks: there
    nothing keeps two apart.
    """
    path = folder / LOCK_FILE
    while True:
        file = path.open("ab")
        if not lock_file(file):
            file.close()
            raise CheckpointError(f"another process is saving into {folder}: wait for it, then save again")
        # Whoever held it before may have removed the file just now; then this is the lock of nothing.
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                break
        file.close()
    with file:
        try:
            yield
        finally:
            with suppress(OSError):  # Windows removes no open file
                path.unlink()
