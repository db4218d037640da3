"""A disk that fails, a process that is killed, and a power loss, at every single thing that is done to a folder.

``Disk`` watches what Python does to the files below a folder: opening for writing, writing, fsync, mkdir, rename,
unlink, rmdir. It can make the k-th of these fail, or kill the process there. ``PowerLoss`` works out what a power loss
at any moment may leave: what wasn't synced is lost, or not, each change of a folder by itself. That is how a missing
fsync is found.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import pathlib
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

ERRORS = (errno.ENOSPC, errno.EACCES, errno.EIO)
KINDS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")
# What a full disk refuses as long as it is full.
TAKES_ROOM = ("open", "write", "fsync", "mkdir")


@dataclass(frozen=True)
class Event:
    """Something that was done: ``kind``, one of ``KINDS``, to ``path``, within the folder; renamed to ``target``."""

    kind: str
    path: str
    target: str = ""


class Disk:
    """Watches a folder while it is entered (``with``). One at a time, for the thread that uses it."""

    def __init__(
        self, root: Path, fail_at: int = 0, error: int = errno.ENOSPC, *, lasting: bool = False, kill: bool = False
    ) -> None:
        """The ``fail_at``-th event fails with ``error``, from 1 on; 0 lets all pass.

        ``lasting``: all later ones that take room fail too. ``kill``: instead of failing, the process ends by SIGKILL.
        """
        self.root = root.resolve()
        self.fail_at, self.error, self.lasting, self.kill = fail_at, error, lasting, kill
        self.count = 0
        self.events: list[Event] = []
        self.failed: list[Event] = []
        self.listeners: list[Callable[[Event], None]] = []
        self._undo: list[Callable[[], None]] = []

    def within(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path within the folder of a path or descriptor, links of its last part not followed; None outside."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        text = os.path.abspath(text)
        text = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
        if text != str(self.root) and not text.startswith(f"{self.root}{os.sep}"):
            return None
        return os.path.relpath(text, self.root)

    def pass_or_fail(self, event: Event, half: Callable[[], object] | None = None) -> None:
        """Counts ``event``, and fails if it is to; ``half``: what is done of it all the same."""
        self.count += 1
        after = self.lasting and 0 < self.fail_at < self.count and event.kind in TAKES_ROOM
        if self.count != self.fail_at and not after:
            return
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        self.failed.append(event)
        if half is not None:
            half()
        raise OSError(self.error, os.strerror(self.error), event.path)

    def done(self, event: Event) -> None:
        """Notes that ``event`` has happened."""
        self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def __enter__(self) -> Disk:
        """Puts itself between Python and the disk."""
        for name, kind in (("unlink", "unlink"), ("remove", "unlink"), ("rmdir", "rmdir"), ("mkdir", "mkdir")):
            self._patch(os, name, self._on_a_name(getattr(os, name), kind))
        for name in ("rename", "replace"):
            self._patch(os, name, self._on_two_names(getattr(os, name)))
        for name in ("fsync", "fdatasync"):
            self._patch(os, name, self._on_a_name(getattr(os, name), "fsync"))
        for name in ("ftruncate", "truncate", "write", "copy_file_range", "sendfile"):
            if hasattr(os, name):
                self._patch(os, name, self._on_a_name(getattr(os, name), "write"))
        self._patch(os, "open", self._os_open(os.open))
        plain = io.open
        for module in (io, builtins):
            self._patch(module, "open", self._io_open(plain))
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves all as it was."""
        while self._undo:
            self._undo.pop()()

    def _patch(self, module: Any, name: str, replacement: Any) -> None:
        # Python 3.10's paths keep functions of os for themselves.
        for place in (module, getattr(pathlib, "_NormalAccessor", None)):
            before = getattr(place, name, None)
            if before is not None:
                self._undo.append(lambda place=place, before=before: setattr(place, name, before))  # type: ignore[misc]
                setattr(place, name, replacement if place is module else staticmethod(replacement))

    def _on_a_name(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            where = self.within(path, kwargs.get("dir_fd"))
            if where is None:
                return original(path, *args, **kwargs)
            event = Event(kind, where)
            self.pass_or_fail(event)
            result = original(path, *args, **kwargs)
            self.done(event)
            return result

        return call

    def _on_two_names(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, **kwargs: Any) -> Any:
            a, b = self.within(source), self.within(target)
            if a is None or b is None:
                return original(source, target, **kwargs)
            event = Event("rename", a, b)
            self.pass_or_fail(event)
            original(source, target, **kwargs)
            self.done(event)

        return call

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            where = self.within(path, kwargs.get("dir_fd"))
            if where is None or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return original(path, flags, *args, **kwargs)
            event = Event("open", where)
            self.pass_or_fail(event)
            descriptor = original(path, flags, *args, **kwargs)
            self.done(event)
            return descriptor

        return call

    def _io_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            where = self.within(file) if set(mode) & set("wxa+") and opener is None else None
            if where is None:
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw_mode = "".join(letter for letter in mode if letter not in "bt")
            if not isinstance(file, int):
                event = Event("open", where)
                self.pass_or_fail(event)
                raw = _WatchedFile(self, where, file, raw_mode, closefd)
                self.done(event)
            else:
                raw = _WatchedFile(self, where, file, raw_mode, closefd)
            if buffering == 0:
                return raw
            binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return binary if "b" in mode else io.TextIOWrapper(binary, encoding or "utf-8", errors, newline)

        return call


class _WatchedFile(io.FileIO):
    """A file below its buffer: what arrives here is what Python gives to the system."""

    def __init__(self, disk: Disk, where: str, file: Any, mode: str, closefd: bool) -> None:
        super().__init__(file, mode, closefd)
        self._disk, self._where = disk, where

    def write(self, content: Any) -> int:
        event = Event("write", self._where)
        # A full disk takes what there is room for.
        self._disk.pass_or_fail(event, lambda: super(_WatchedFile, self).write(memoryview(content).cast("B")[:7]))
        count = super().write(content)
        self._disk.done(event)
        return count


def every_fault(
    prepare: Callable[[], Path],
    action: Callable[[Path], object],
    outcome: Callable[[Path], str],
    *,
    lasting: bool = False,
    errors: tuple[int, ...] = ERRORS,
    step: int = 1,
) -> Counter[str]:
    """What ``outcome`` finds after ``action`` failed at its first, second, ... event, until it passes without.

    ``prepare`` makes the folder anew each time. ``errors``: with which the events fail, in turn. ``step``: 5 takes
    every fifth event. Whoever fails must say so, by ``OSError``; when only what tidies up failed, an action may also
    end well.
    """
    found: Counter[str] = Counter()
    number = 1 - step
    while True:
        number += step
        folder = prepare()
        disk = Disk(folder, number, errors[number % len(errors)], lasting=lasting)
        raised = None
        with disk:
            try:
                action(folder)
            except OSError as error:
                raised = error
        if not disk.failed:
            assert raised is None
            assert number > 1, "nothing was done to the folder"
            return found
        # Of a folder that is there already, nobody need know that it can't be made.
        may_end_well = disk.failed[0].kind in ("unlink", "rmdir", "mkdir")
        assert raised is not None or may_end_well, f"{disk.failed[0]} went unnoticed"
        try:
            found[outcome(folder)] += 1
        except Exception as error:
            raise AssertionError(f"after event {number}, {disk.failed[0]}, failed: {error}") from error


def every_kill(
    prepare: Callable[[], Path], action: Callable[[Path], object], outcome: Callable[[Path], str], *, step: int = 1
) -> Counter[str]:
    """As ``every_fault``, with a process that is killed right before its first, second, ... event."""
    found: Counter[str] = Counter()
    action(prepare())  # what the children then have imported and made already
    number = 1 - step
    while True:
        number += step
        folder = prepare()
        status = in_child(lambda folder=folder, number=number: _killed(folder, number, action))  # type: ignore[misc]
        if not os.WIFSIGNALED(status):
            assert status == 0, f"the child ended with {status}"
            assert number > 1, "nothing was done to the folder"
            return found
        try:
            found[outcome(folder)] += 1
        except Exception as error:
            raise AssertionError(f"after a kill before event {number}: {error}") from error


def _killed(folder: Path, number: int, action: Callable[[Path], object]) -> None:
    with Disk(folder, number, kill=True):
        action(folder)


def in_child(work: Callable[[], object], while_it_runs: Callable[[int], object] | None = None) -> int:
    """Runs ``work`` in a fork, where all is imported already; returns the status that ``os.waitpid`` gives.

    ``while_it_runs`` gets the child's process id.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # tqdm's own is shared with the parent, which would wait for it if the child is killed as it has it.
            tqdm.set_lock(threading.RLock())
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    if while_it_runs is not None:
        while_it_runs(child)
    return os.waitpid(child, 0)[1]


@dataclass(eq=False)
class _Node:
    """A file or a folder. ``content``: of a file, what is sure to be on the disk; empty if nothing is."""

    is_folder: bool
    content: bytes = b""
    entries: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)


@dataclass(eq=False)
class _Change:
    """Of folders: each name is now that node, or gone. On the disk once ``owner`` is synced."""

    owner: _Node
    effects: list[tuple[_Node, str, _Node | None]]


Tree = dict[str, "bytes | None"]
"""Paths and contents; None for a folder."""


class PowerLoss:
    """What a power loss may leave of a folder, at any moment while ``disk`` is watched.

    Changes of a folder that wasn't synced since may be on the disk or not: none of them, all, only one, or all but one
    are tried. A file has the content of its last fsync, or nothing. More is lost here than most file systems lose, and
    nothing that POSIX promises to keep.
    """

    def __init__(self, disk: Disk) -> None:
        """``disk`` isn't entered yet: all that is in its folder now is safe."""
        self._root = _read(disk.root)
        self._disk = disk
        self._pending: list[_Change] = []
        self._seen: list[Tree] = []
        self._note()
        disk.listeners.append(self._follow)

    @property
    def trees(self) -> list[Tree]:
        """All that may be left at any moment up to now, without what appears twice."""
        return self._seen

    @property
    def trees_now(self) -> list[Tree]:
        """What may be left now, for instance after all is said to be done."""
        return list(self._possible())

    def _follow(self, event: Event) -> None:
        parent, name = self._at(os.path.dirname(event.path)), os.path.basename(event.path)
        if event.kind == "mkdir":
            self._change(parent, [(parent, name, _Node(True))])
        elif event.kind == "open":
            if name not in parent.entries:
                self._change(parent, [(parent, name, _Node(False))])
        elif event.kind == "write":
            self._at(event.path).content = b""
        elif event.kind == "fsync":
            node = self._at(event.path)
            if node.is_folder:
                self._sync(node)
            else:
                node.content = (self._disk.root / event.path).read_bytes()
        elif event.kind in ("unlink", "rmdir"):
            self._change(parent, [(parent, name, None)])
        elif event.kind == "rename":
            target, new_name = self._at(os.path.dirname(event.target)), os.path.basename(event.target)
            self._change(target, [(parent, name, None), (target, new_name, parent.entries[name])])
        self._note()

    def _at(self, path: str) -> _Node:
        node = self._root
        for part in Path(path).parts:
            node = node.entries[part]
        return node

    def _change(self, owner: _Node, effects: list[tuple[_Node, str, _Node | None]]) -> None:
        for folder, name, node in effects:
            _put(folder.entries, name, node)
        self._pending.append(_Change(owner, effects))

    def _sync(self, folder: _Node) -> None:
        for change in [change for change in self._pending if change.owner is folder]:
            for where, name, node in change.effects:
                _put(where.durable, name, node)
            self._pending.remove(change)

    def _note(self) -> None:
        self._seen += [tree for tree in self._possible() if tree not in self._seen]

    def _possible(self) -> Iterator[Tree]:
        pending = self._pending
        choices = [[], pending, *([one] for one in pending), *([p for p in pending if p is not one] for one in pending)]
        for chosen in choices:
            yield dict(_walk(self._root, chosen, ""))


def _read(path: Path) -> _Node:
    if not path.is_dir() or path.is_symlink():
        return _Node(False, path.read_bytes())
    entries = {each.name: _read(each) for each in path.iterdir()}
    return _Node(True, b"", entries, dict(entries))


def _put(entries: dict[str, _Node], name: str, node: _Node | None) -> None:
    entries.pop(name, None)
    if node is not None:
        entries[name] = node


def _walk(folder: _Node, changes: list[_Change], prefix: str) -> Iterator[tuple[str, bytes | None]]:
    entries = dict(folder.durable)
    for change in changes:
        for where, name, node in change.effects:
            if where is folder:
                _put(entries, name, node)
    for name, node in sorted(entries.items()):
        path = f"{prefix}{name}"
        yield path, None if node.is_folder else node.content
        if node.is_folder:
            yield from _walk(node, changes, f"{path}/")


def write_tree(tree: Tree, folder: Path) -> Path:
    """Makes ``folder``, anew, with what is in ``tree``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
    return folder


def every_power_loss(
    folder: Path, action: Callable[[Path], object], outcome: Callable[[Path], str], work: Path
) -> tuple[Counter[str], Counter[str]]:
    """What ``outcome`` finds after a power loss at any moment of ``action`` on ``folder``, and after its end.

    Each is looked at in the folder ``work``, made anew.
    """
    disk = Disk(folder)
    loss = PowerLoss(disk)
    with disk:
        action(folder)
    return tuple(  # type: ignore[return-value]
        Counter(_outcome_of(tree, disk, work, outcome) for tree in trees) for trees in (loss.trees, loss.trees_now)
    )


def _outcome_of(tree: Tree, disk: Disk, work: Path, outcome: Callable[[Path], str]) -> str:
    try:
        return outcome(write_tree(tree, work))
    except Exception as error:
        sizes = {path: None if content is None else len(content) for path, content in tree.items()}
        raise AssertionError(f"a power loss may leave {sizes}: {error}; what was done: {disk.events}") from error
