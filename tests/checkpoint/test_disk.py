"""Only regular files are read; a file is replaced in one step, also by several at a time."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from qgemm.checkpoint import CheckpointError
from qgemm.checkpoint.disk import lock_file, make_folder, open_regular, remove_unfinished, replacing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_regular_file_is_read_also_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    (tmp_path / "link").symlink_to("x")
    for name in ("x", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"content"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes and sockets in folders here")
@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device", "link to a pipe"])
def test_nothing_else_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)  # the name of a socket may be short only
        socket.socket(socket.AF_UNIX).bind("x")
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    with pytest.raises(CheckpointError, match=rf"{path.name} is a {kind.split()[-1]}; only regular files are read"):
        open_regular(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
def test_a_pipe_that_takes_the_place_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").touch()
    status = os.stat(tmp_path / "x")
    (tmp_path / "x").unlink()
    os.mkfifo(tmp_path / "x")
    monkeypatch.setattr(os, "stat", lambda path: status)
    with pytest.raises(CheckpointError, match="is a pipe"):
        open_regular(tmp_path / "x")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "x")


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_alone(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["x"]


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError, match="there is a folder with this name"), replacing(tmp_path / "x"):
        pytest.fail("the work is done for nothing")
    assert names(tmp_path) == ["x"]


def test_what_the_killed_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    others = [".x.tmp-0123", ".xy.tmp-01234567", ".x.tmp-01234567.bak", "x.tmp-01234567"]
    for name in (*others, ".x.tmp-01234567", ".x.tmp-89abcdef"):
        (tmp_path / name).touch()
    with (tmp_path / ".x.tmp-89abcdef").open("rb") as one_at_work:
        assert lock_file(one_at_work)
        with replacing(tmp_path / "x"):
            pass
        assert names(tmp_path) == sorted([*others, ".x.tmp-89abcdef", "x"])
    remove_unfinished(tmp_path)
    assert names(tmp_path) == sorted({*others, "x"} - {".xy.tmp-01234567"})


def test_many_writers_at_a_time(tmp_path: Path) -> None:
    """Nobody takes away what another one is at, and no file is mixed."""
    path = tmp_path / "x"
    failures: list[BaseException] = []

    def write(letter: bytes) -> None:
        try:
            for _ in range(50):
                with replacing(path) as file:
                    for _ in range(4):
                        file.write(letter)
                        file.flush()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c", b"d")]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert len(set(path.read_bytes())) == 1
    assert not failures
    assert len(path.read_bytes()) == 4
    assert names(tmp_path) == ["x"]


def test_folders_are_made_where_there_are_none(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "x").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "x")
