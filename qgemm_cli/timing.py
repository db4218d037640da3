"""Measures how long one call takes on the device.

A measured pass is a run of calls over several copies of the weight, which are larger than the caches together, so that
each call reads its weight from memory, as a model's layers do. On a GPU a pass is a CUDA graph, so the host's time
isn't included. The passes to be compared are timed in turn, round after round, so that changes of clocks and
temperature affect all of them equally; a time is the median over all rounds.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

ROTATED_BYTES = {"cuda": 320 << 20, "cpu": 128 << 20}
"""The size that the copies of a weight together must exceed."""
MAX_CALLS = 256
"""The maximum number of calls, and so of copies, in a pass: smaller weights stay in the cache, as in a model."""

MOST_LOAD = 0.5
"""Per core: a higher load average, before anything is timed, makes times doubtful."""
MOST_STOLEN = 0.02
"""The fraction of the processors' time while something is timed."""

_PASS_SECONDS = 1.5e-3  # the target, so that a replay's own start (1 to 2 us) is far below 1 %


@dataclass(frozen=True)
class Effort:
    """How long to measure: ``rounds``, in each of which every pass runs for about ``seconds``, at least once.

    ``lead``: how many seconds it runs untimed before that.
    """

    rounds: int = 7
    seconds: float = 0.01
    lead: float = 0.0


QUICK = Effort(rounds=3, seconds=0.003)


def copy_count(weight_bytes: int, device: torch.device) -> int:
    """How many copies of a weight exceed ``ROTATED_BYTES``: at least 2, at most ``MAX_CALLS``."""
    return min(max(ROTATED_BYTES[device.type] // max(weight_bytes, 1) + 1, 2), MAX_CALLS)


class Pass:
    """``calls`` calls of ``run(weight)`` over ``weights`` in turn; ``output`` is the result of the last one."""

    def __init__(self, run: Callable[[Any], Tensor], weights: Sequence[Any], device: torch.device) -> None:
        """Runs each kernel once, so that it is compiled; on a GPU, captures the calls. Raises what the calls raise."""
        self._run = run
        self._weights = weights
        self._graph: torch.cuda.CUDAGraph | None = None
        self.calls = len(weights)
        self.output = run(weights[0])
        if device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        self.calls *= max(1, int(_PASS_SECONDS / self._seconds_of_a_call() / self.calls))
        self.calls = min(self.calls, max(MAX_CALLS, len(self._weights)))
        graph = torch.cuda.CUDAGraph()
        del self.output  # so that only one output exists at a time: the largest has a gigabyte
        with torch.cuda.graph(graph):
            output = None
            for call in range(self.calls):
                output = None
                output = self._run(self._weights[call % len(self._weights)])
        assert output is not None
        self._graph = graph
        self.output = output

    def _seconds_of_a_call(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            self._run(self._weights[0])
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 3e3

    def __call__(self) -> None:
        """Runs all calls; on a GPU, leaves them queued."""
        if self._graph is not None:
            self._graph.replay()
            return
        for weight in self._weights:
            self.output = self._run(weight)

    def checked_output(self) -> Tensor:
        """The output of one more pass, in memory that contained no correct result before."""
        self.output.fill_(torch.nan if self.output.is_floating_point() else torch.iinfo(self.output.dtype).min)
        self()
        return self.output


def all_seconds(passes: Mapping[str, Pass], effort: Effort, device: torch.device) -> dict[str, list[float]]:
    """The seconds per call in each run of a pass, by the pass's name."""
    time_once = clock_of(device)
    once = {name: max(statistics.median(time_once(one, 1)), 1e-9) for name, one in passes.items()}
    times: dict[str, list[float]] = {name: [] for name in passes}
    names = list(passes)
    for _ in range(effort.rounds):
        for name in names:
            lead, timed = int(effort.lead / once[name]), max(1, int(effort.seconds / once[name]))
            times[name] += time_once(passes[name], lead + timed)[lead:]
        names.reverse()  # so that no pass always follows the same one
    return {name: [value / passes[name].calls for value in values] for name, values in times.items()}


def spread(values: Sequence[float]) -> float:
    """The range of the middle half of some times, relative to their median; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


class Bystanders:
    """Other work on this machine's processors, measured before something is timed, and after."""

    def __init__(self) -> None:
        """Takes the first measurement."""
        self.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._ticks = _stolen_ticks()

    def complaints(self) -> list[str]:
        """Sentences about what makes times taken since then doubtful; empty on a quiet machine."""
        found = []
        if self.load > MOST_LOAD * self.cores:
            found.append(
                f"the machine was busy before anything was timed: a load of {self.load:.1f} on {self.cores} cores"
            )
        stolen, ticks = (after - before for before, after in zip(self._ticks, _stolen_ticks(), strict=True))
        if ticks and stolen > MOST_STOLEN * ticks:
            found.append(f"other virtual machines took {stolen / ticks:.0%} of the processors' time")
        return found


def _stolen_ticks() -> tuple[int, int]:
    """For all processors since boot: the time that a hypervisor gave to others, and the total; zeros if unknown."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(part) for part in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return (ticks[7], sum(ticks)) if len(ticks) == 8 else (0, 0)


def clock_of(device: torch.device) -> Callable[[Callable[[], object], int], list[float]]:
    """``times(run, repeats)``: the seconds that each of ``repeats`` runs takes on ``device``."""
    return _gpu_times if device.type == "cuda" else _cpu_times


def _gpu_times(one: Callable[[], object], repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    one()  # untimed: it keeps the GPU busy while the host queues the timed runs
    events[0].record()
    for event in events[1:]:
        one()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def _cpu_times(one: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        one()
        times.append(time.perf_counter() - start)
    return times
