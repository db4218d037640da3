"""Kills what writes files, by SIGKILL at random times, and looks at what is left: all is old, or new.

    python tests/checkpoint/kills.py --kills 300 --seed 0
    python tests/checkpoint/kills.py --kills 300 --seed 0 stream convert
    python tests/checkpoint/kills.py --moments

Each killed process is a fork of this one, in which everything is imported already. ``--moments`` doesn't take random
times: it fails each write, fsync, rename, unlink, mkdir and opening in turn, with every error and as on a full disk,
kills right before each, and works out what a power loss may leave.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from checkpoint.faults import ERRORS, every_fault, every_kill, every_power_loss, in_child
from checkpoint.writers import WRITERS, Writer


def kill_at_random(writer: Writer, work: Path, kills: int, seed: int) -> Counter[str]:
    """What ``writer.outcome`` finds after each of so many kills; raises ``AssertionError`` if it is no whole state."""
    rng = random.Random(f"{writer.name} {seed}")
    found: Counter[str] = Counter()
    longest = _seconds(writer, work)
    done = 0
    while done < kills:
        folder = writer.folder(work)
        after = rng.uniform(0, longest)
        status = in_child(lambda folder=folder: writer.write(folder), lambda child, after=after: _kill(child, after))
        done += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            assert status == 0, f"{writer.name} ended with {status}"
            longest *= 0.98  # it was done before; so that most are killed
        try:
            found[writer.outcome(folder)] += os.WIFSIGNALED(status)
        except Exception as error:
            left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
            raise AssertionError(f"{writer.name}, killed after {after:.4f} s, left {left}: {error}") from error
    assert found.keys() <= {writer.before, "new"}, f"{writer.name}: {found}"
    return found


def _seconds(writer: Writer, work: Path) -> float:
    writer.write(writer.folder(work))  # what the children then have imported and made already
    times = []
    for _ in range(3):
        folder = writer.folder(work)
        began = time.monotonic()
        assert in_child(lambda folder=folder: writer.write(folder)) == 0
        times.append(time.monotonic() - began)
    return max(times)


def _kill(child: int, after: float) -> None:
    time.sleep(after)
    os.kill(child, signal.SIGKILL)


def try_all_moments(writer: Writer, work: Path) -> dict[str, Counter[str]]:
    """What ``writer.outcome`` finds after every fault, by its kind."""
    parts = (lambda: writer.folder(work), writer.write, writer.outcome)
    found = {os.strerror(error): every_fault(*parts, errors=(error,)) for error in ERRORS}
    found["full disk"] = every_fault(*parts, lasting=True)
    found["kill"] = every_kill(*parts)
    at_any_moment, at_the_end = every_power_loss(writer.folder(work), writer.write, writer.outcome, work / "../after")
    assert set(at_the_end) == {"new"}, at_the_end
    found["power loss"] = at_any_moment
    assert all(counts.keys() <= {writer.before, "new"} for counts in found.values()), f"{writer.name}: {found}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("writers", nargs="*", help=f"which of {', '.join(WRITERS)}; all, without")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moments", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in args.writers or WRITERS:
            began = time.monotonic()
            try:
                writer, work = WRITERS[name], Path(folder).resolve() / "work"
                found = (
                    try_all_moments(writer, work)
                    if args.moments
                    else kill_at_random(writer, work, args.kills, args.seed)
                )
                print(f"{name}: {found}, {time.monotonic() - began:.0f} s", flush=True)
            except AssertionError:
                failures += 1
                traceback.print_exc()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
