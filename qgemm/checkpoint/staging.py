"""Replaces the files of a folder so that it holds a whole set of them at every moment: the old one, then the new one.

One file points to all others, as ``config.json`` of a checkpoint does. The new files are first written completely under
temporary names. Then those that are pointed to get names that no file has yet, and one rename puts the pointer into
place: before it, the folder holds the old set, after it, the new one. What the old one needed is removed last. The
folder is forced to the disk before and after that rename, so a power cut leaves one of the two as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from qgemm.checkpoint.disk import sync_file, sync_folder, unfinished_path


class StagedFiles:
    """New files for ``folder``, not yet under their names. ``publish`` puts them there; ``discard`` removes them."""

    def __init__(self, folder: Path) -> None:
        """``folder`` must exist."""
        self.folder = folder
        self._staged: dict[str, Path] = {}
        self._placed: list[Path] = []  # that nothing points to yet
        self._pointer: Path | None = None  # the last one, before it gets its name

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Opens a new file that is to be called ``name``, and sees it safely on the disk at the end."""
        self._staged[name] = unfinished_path(self.folder / name)
        with self._staged[name].open("xb") as file:
            yield file
            sync_file(file)

    def publish(self, last: str) -> None:
        """Moves the files to their names, ``last``, which points to the others, after them.

        Those must be names that no file has. If that fails, ``discard`` leaves the folder as it was.
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
        """Removes the files that aren't in place, or in a place that nothing points to."""
        # Asked of the disk: an interrupt may come between the rename and whatever would note it here.
        is_published = self._pointer is not None and not self._pointer.exists()
        for path in (*(() if is_published else self._placed), *self._staged.values()):
            with suppress(OSError):  # one that can't be removed should keep nobody from removing the rest
                path.unlink(missing_ok=True)
        self._placed.clear()
        self._staged.clear()
        self._pointer = None


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Removes files of which nothing is left that points to them; folders of those names stay."""
    for name in names:
        if not (folder / name).is_dir() or (folder / name).is_symlink():
            (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
