"""Whatever fails while files are written, and wherever the process is killed or the power lost: all is old, or new."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from checkpoint.faults import Disk, every_fault, every_kill, every_power_loss
from checkpoint.kills import kill_at_random
from checkpoint.writers import CALIBRATION, CONVERT_ANEW, RECIPE, SAVE, STREAM, Writer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to know which file is meant")

# With every how many of their events are tried here: some take a tenth of a second each. kills.py tries all.
STEPS = {CALIBRATION: 1, RECIPE: 1, SAVE: 5, CONVERT_ANEW: 17, STREAM: 37}
WRITERS = pytest.mark.parametrize("writer", STEPS, ids=lambda writer: writer.name)


@pytest.mark.slow(quick=["one failure-save"])
@WRITERS
@pytest.mark.parametrize("lasting", [False, True], ids=["one failure", "full disk"])
def test_an_error_at_any_moment(writer: Writer, lasting: bool, tmp_path: Path) -> None:
    work, step = tmp_path / "work", STEPS[writer]
    found = every_fault(lambda: writer.folder(work), writer.write, writer.outcome, lasting=lasting, step=step)
    assert found.keys() <= {writer.before, "new"}
    assert found.keys() == {writer.before, "new"} or step > 1


@pytest.mark.slow(quick=["save"])
@WRITERS
def test_a_kill_at_any_moment(writer: Writer, tmp_path: Path) -> None:
    work, step = tmp_path / "work", STEPS[writer]
    found = every_kill(lambda: writer.folder(work), writer.write, writer.outcome, step=step)
    assert found.keys() <= {writer.before, "new"}
    assert found.keys() == {writer.before, "new"} or step > 1


@pytest.mark.complete  # beside a power loss at any moment
def test_kills_at_random_times(tmp_path: Path) -> None:
    found = kill_at_random(CALIBRATION, tmp_path / "work", 12, 0)
    assert sum(found.values()) == 12


@pytest.mark.slow(quick=["save"])
@WRITERS
def test_a_power_loss_at_any_moment(writer: Writer, tmp_path: Path) -> None:
    """What isn't synced may be lost: the order of syncs and renames is right."""
    at_any_moment, at_the_end = every_power_loss(
        writer.folder(tmp_path / "work"), writer.write, writer.outcome, tmp_path / "after"
    )
    assert set(at_any_moment) == {writer.before, "new"}
    assert set(at_the_end) == {"new"}


@pytest.mark.slow(quick=["save"])
@pytest.mark.parametrize("writer", [CALIBRATION, RECIPE, SAVE], ids=lambda writer: writer.name)
def test_nothing_is_left_of_a_kill_once_it_is_done_again(writer: Writer, tmp_path: Path) -> None:
    folder = writer.folder(tmp_path / "work")
    writer.write(folder)
    before = len(os.listdir(folder))
    every_kill(lambda: folder, writer.write, writer.outcome, step=STEPS[writer])
    assert len(os.listdir(folder)) == before


# The harness itself: writers that are known to be wrong are found out.


def careless(folder: Path) -> None:
    (folder / "x").write_text("new")


def unsynced(folder: Path) -> None:
    (folder / "y").write_text("new")
    os.replace(folder / "y", folder / "x")


def never_on_disk(folder: Path) -> None:
    with (folder / "y").open("w") as file:
        file.write("new")
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "y", folder / "x")


def gone_for_a_while(folder: Path) -> None:
    with (folder / "y").open("w") as file:
        file.write("new")
        file.flush()
        os.fsync(file.fileno())
    (folder / "x").unlink()
    os.rename(folder / "y", folder / "x")


def heedless(folder: Path) -> None:
    with suppress(OSError):
        never_on_disk(folder)


WRONG = {
    "fault": [careless, gone_for_a_while, heedless],
    "kill": [careless, gone_for_a_while],
    "power": [careless, unsynced, gone_for_a_while, never_on_disk],
}


def prepared(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "x").write_text("old")
    return folder


def content(folder: Path) -> str:
    text = (folder / "x").read_text()
    assert text in ("old", "new")
    return text


def attempt(kind: str, action: object, tmp_path: Path) -> None:
    def prepare() -> Path:
        return prepared(tmp_path / "work")

    if kind == "power":
        found, at_the_end = every_power_loss(prepare(), action, content, tmp_path / "after")  # type: ignore[arg-type]
        assert set(at_the_end) == {"new"}
    else:
        found = {"fault": every_fault, "kill": every_kill}[kind](prepare, action, content)  # type: ignore[operator]
    assert set(found) == {"old", "new"}


@pytest.mark.parametrize(("kind", "action"), [(kind, action) for kind, wrong in WRONG.items() for action in wrong])
def test_the_harness_sees_what_is_wrong(kind: str, action: object, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        attempt(kind, action, tmp_path)


@pytest.mark.parametrize("kind", ["fault", "kill", "power"])
def test_the_harness_sees_what_is_right(kind: str, tmp_path: Path) -> None:
    def right(folder: Path) -> None:
        never_on_disk(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    attempt(kind, right, tmp_path)


def test_the_harness_sees_every_way_to_touch_a_disk(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    disk = Disk(tmp_path / "inside")
    with disk:
        (tmp_path / "outside").write_text("not counted")
        (tmp_path / "inside" / "a").mkdir()
        (tmp_path / "inside" / "a" / "b").write_text("x")
        with open(tmp_path / "inside" / "c", "wb") as file:
            file.write(b"y")
            file.flush()
            os.fsync(file.fileno())
        (tmp_path / "inside" / "c").rename(tmp_path / "inside" / "d")
        os.remove(tmp_path / "inside" / "d")
        shutil.rmtree(tmp_path / "inside" / "a")
    kinds = [event.kind for event in disk.events]
    assert kinds == ["mkdir", "open", "write", "open", "write", "fsync", "rename", "unlink", "unlink", "rmdir"]
    assert (tmp_path / "outside").read_text() == "not counted"
