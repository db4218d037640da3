"""What benchmarks time beside what ``qgemm bench`` does, by the same clock: medians, the host's time, copies."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from qgemm.device import no_garbage_collection
from qgemm_cli.timing import Effort, Pass, all_seconds, clock_of

SUSTAINED = Effort(rounds=3, seconds=0.06, lead=0.04)
"""For passes that keep a GPU's tensor cores busy, and so at its power limit.

How fast those run depends on the power that they take, and clocks follow it after some 10 ms: in shorter turns
everybody runs at the clock that the others have left behind.
"""


def median_seconds(passes: Mapping[str, Pass], effort: Effort, device: torch.device) -> dict[str, float]:
    """Seconds of one call, by the name of its pass."""
    return {name: statistics.median(values) for name, values in all_seconds(passes, effort, device).items()}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, that a copy within the device's memory moves: the median of 20."""
    size = (1 << 30) if device.type == "cuda" else (64 << 20)
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    # Not in a graph: there a copy goes through the copy engine, at two thirds of what kernels reach on an H200.
    return 2 * size / statistics.median(clock_of(device)(lambda: target.copy_(source), 20))


def host_seconds(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Host seconds of one call, by name: medians of 21 times 300 calls, taken in turn, nothing synchronized.

    The calls must be short on the GPU, so that the queue never fills (it holds about 1,000 launches): then what is
    measured is the host alone.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    with no_garbage_collection():
        for repeat in range(21 + 2):
            for name, run in runs.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(300):
                    run()
                seconds = (time.perf_counter() - start) / 300
                if repeat >= 2:  # the first ones warm up
                    times[name].append(seconds)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}
