"""One saver at a time, as long as it lives."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from qgemm.checkpoint import CheckpointError
from qgemm.checkpoint.locking import LOCK_FILE, locked

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")


def test_one_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).exists()
        with pytest.raises(CheckpointError, match=r"another process is saving into .*: wait"), locked(tmp_path):
            pass
        refused: list[bool] = []
        thread = threading.Thread(target=lambda: refused.append(_is_refused(tmp_path)))
        thread.start()
        thread.join()
        assert refused == [True]
    assert not list(tmp_path.iterdir())
    with locked(tmp_path):
        pass


def _is_refused(folder: Path) -> bool:
    try:
        with locked(folder):
            return False
    except CheckpointError:
        return True


def _hold(folder: Path, connection: Connection) -> None:
    with locked(folder):
        connection.send("held")
        time.sleep(60)


def test_the_lock_of_a_process_that_was_killed(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path, theirs))
    process.start()
    try:
        assert ours.poll(30)
        assert _is_refused(tmp_path)
    finally:
        process.kill()
        process.join()
    assert not _is_refused(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_while_it_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another process was about to finish as this one opened the file.
    from qgemm.checkpoint import locking

    taken = []

    def take(file: object) -> bool:
        if not taken:
            (tmp_path / LOCK_FILE).unlink()
        taken.append(file)
        return True

    monkeypatch.setattr(locking, "lock_file", take)
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).exists()
    assert len(taken) == 2
