"""Replaces the files of a folder so that a crash or a full disk never leaves a mixture of old and new.

Everything is first written completely under temporary names. Then the one file without which the folder doesn't load is
removed, the others are moved into place, and that file comes last. At any moment the folder holds the old files, or
the new ones, or doesn't load.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class StagedFiles:
    """New files for ``folder``, not yet under their names. ``publish`` puts them there; ``discard`` removes them."""

    def __init__(self, folder: Path) -> None:
        """``folder`` must exist."""
        self.folder = folder
        self._staged: dict[str, Path] = {}

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Opens a new file that is to be called ``name``, and sees it safely on the disk at the end."""
        path = self.folder / f".{name}.tmp-{secrets.token_hex(4)}"
        self._staged[name] = path
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def publish(self, last: str, stale: Iterable[str]) -> None:
        """Moves the files to their names, ``last`` after all others, and removes those named in ``stale``."""
        (self.folder / last).unlink(missing_ok=True)
        self._sync_folder()
        for name in stale:
            (self.folder / name).unlink(missing_ok=True)
        for name in [name for name in self._staged if name != last]:
            self._move(name)
        self._sync_folder()
        self._move(last)
        self._sync_folder()

    def discard(self) -> None:
        """Removes the files that aren't in place."""
        for path in self._staged.values():
            path.unlink(missing_ok=True)
        self._staged.clear()

    def _move(self, name: str) -> None:
        os.replace(self._staged[name], self.folder / name)
        del self._staged[name]

    def _sync_folder(self) -> None:
        # Renames reach the disk in their order only if the folder is synced between them. Windows can't open one.
        if os.name == "posix":
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
