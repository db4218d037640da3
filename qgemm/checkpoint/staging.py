"""Replaces the files of a folder so that it holds a complete set at every moment: the old one, then the new one.

One file points to all others, as ``config.json`` in a checkpoint does. New files are first written completely under
temporary names. Then the files pointed to get unused names, and one rename puts the pointer in place: before it, the
folder holds the old set, after it, the new one. Old files that are no longer needed are removed last. The folder is
forced to the disk before and after that rename, so a power failure leaves one of the two sets as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from qgemm.checkpoint.disk import sync_file, sync_folder, unfinished_path


class StagedFiles:
    """New files for ``folder``, under temporary names. ``publish`` puts them in place; ``discard`` removes them."""

    def __init__(self, folder: Path) -> None:
        """``folder`` must exist."""
        self.folder = folder
        self._staged: dict[str, Path] = {}
        self._placed: list[Path] = []  # files in place that nothing points to yet
        self._pointer: Path | None = None  # the pointer's temporary file, before it gets its name

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Opens a new file that will be called ``name``; at the end of the block, it is safely on the disk."""
        self._staged[name] = unfinished_path(self.folder / name)
        with self._staged[name].open("xb") as file:
            yield file
            sync_file(file)

    def publish(self, last: str) -> None:
        """Renames the files; ``last``, which points to the others, comes last.

        The others must have names that no file has. If it fails, ``discard`` leaves the folder as it was.
        """
        self._pointer = self._staged[last]
        for name in [name for name in self._staged if name != last]:
            self._placed.append(self.folder / name)
            os.replace(self._staged[name], self.folder / name)
            del self._staged[name]
        sync_folder(self.folder)
        os.replace(self._pointer, self.folder / last)
        sync_folder(self.folder)

    def discard(self) -> None:
        """Removes the files that aren't in place, or that nothing points to."""
        # Checked on the disk, because an interrupt may come between the rename and any note of it here.
        is_published = self._pointer is not None and not self._pointer.exists()
        for path in (*(() if is_published else self._placed), *self._staged.values()):
            with suppress(OSError):  # a file that can't be removed shouldn't keep the rest from being removed
                path.unlink(missing_ok=True)
        self._placed.clear()
        self._staged.clear()
        self._pointer = None


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Removes files that nothing points to any more; folders with these names stay."""
    for name in names:
        if not (folder / name).is_dir() or (folder / name).is_symlink():
            (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
