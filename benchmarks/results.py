"""What a run found, as values that are saved in JSON and read back to draw tables and plots."""

import argparse
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.roofline import Roofline
from qgemm.version import __version__

PACKAGES = ("torch", "triton", "transformers", "vllm", "torchao", "gemlite", "bitsandbytes", "llmcompressor")


@dataclass(frozen=True)
class Measurement:
    """One provider on ``[M, K] @ [K, N]`` at one level; ``us`` is None where it wasn't timed, and ``reason`` says why.

    ``us``: microseconds of a call. ``error``: the largest relative error of a row (``qgemm_cli/check.py``). ``tops``:
    tera-operations a second. ``tb_per_s``: terabytes a second, of the fewest bytes that must move. ``share``: of the
    roofline's limit, 1 at the limit.
    """

    provider: str
    level: str
    family: str
    N: int
    K: int
    M: int
    us: float | None = None
    error: float | None = None
    tops: float | None = None
    tb_per_s: float | None = None
    share: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class ConfigCheck:
    """The config that ``select_config`` chose for a product, beside the fastest of all; times in microseconds."""

    N: int
    K: int
    M: int
    chosen: str
    chosen_us: float
    best: str
    best_us: float

    @property
    def ratio(self) -> float:
        """How many times as long the chosen one takes; 1 where it is the fastest."""
        return self.chosen_us / self.best_us


@dataclass(frozen=True)
class Quantization:
    """``quantize_rows`` of ``[M, K]``: microseconds, and terabytes a second that it reads and writes.

    ``share``: of the rate at which a large copy moves bytes, measured in the same run.
    """

    M: int
    K: int
    us: float
    tb_per_s: float
    share: float


@dataclass
class Run:
    """Everything that one run measured, and where."""

    environment: dict[str, Any]
    bandwidth: float
    peak_tops: dict[str, float]
    measurements: list[Measurement] = field(default_factory=list)
    host_us: dict[str, dict[str, float]] = field(default_factory=dict)
    """By provider, then by rows."""
    config_checks: list[ConfigCheck] = field(default_factory=list)
    quantizations: list[Quantization] = field(default_factory=list)

    @property
    def roofline(self) -> Roofline:
        """The limits that shares are of."""
        return Roofline(self.bandwidth, self.peak_tops)

    def save(self, path: Path) -> None:
        """Writes the run as JSON, in place of what was there."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Run":
        """A run as ``save`` wrote it."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values["measurements"] = [Measurement(**entry) for entry in values["measurements"]]
        values["config_checks"] = [ConfigCheck(**entry) for entry in values["config_checks"]]
        values["quantizations"] = [Quantization(**entry) for entry in values.get("quantizations", ())]
        return cls(**values)


@dataclass(frozen=True)
class Spread:
    """Ratios over several shapes: their geometric mean, the least and the greatest."""

    mean: float
    least: float
    greatest: float


def speedups(
    measurements: Iterable[Measurement], level: str, slower: str, faster: str, families: Sequence[str] | None = None
) -> dict[int, Spread]:
    """By M: how many times as fast ``faster`` is as ``slower``, over the shapes (of ``families``) that both have."""
    times: dict[str, dict[tuple[int, int, int], float]] = {slower: {}, faster: {}}
    for one in measurements:
        if one.level == level and one.provider in times and one.us and (families is None or one.family in families):
            times[one.provider][one.M, one.N, one.K] = one.us
    ratios: dict[int, list[float]] = {}
    for size, us in sorted(times[slower].items()):
        if size in times[faster]:
            ratios.setdefault(size[0], []).append(us / times[faster][size])
    return {M: Spread(geometric_mean(values), min(values), max(values)) for M, values in ratios.items()}


def write(path: Path, text: str) -> None:
    """Writes ``text`` and an end of line, into a folder that is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def write_json(path: Path, values: object) -> None:
    """Writes what was measured as JSON, as ``write`` does."""
    write(path, json.dumps(values, indent=1))


def command_line(name: str, doc: str) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.name``, with the options of every benchmark that prints one table."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--commit", help="what to call the commit, in a copy of the tree without git")
    return parser


def show(text: str, results: Sequence[Any], about: dict[str, Any], path: Path | None, **others: object) -> None:
    """Prints ``text``, a table of ``results``, and what measured them; then ``write_results``."""
    print(f"{about['device']}, torch {torch.__version__}, commit {about['commit']}")
    print(text)
    write_results(path, results, about, **others)


def write_results(path: Path | None, results: Sequence[Any], about: dict[str, Any], **others: object) -> None:
    """Writes ``results``, what measured them and ``others`` to a JSON file, if one is named."""
    if path:
        write_json(path, {"environment": about, **others, "results": [asdict(result) for result in results]})


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """The device, the versions, the commit and the time. ``commit``: of a copy of the tree that git doesn't know."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions["qgemm"] = __version__
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({_cpu_name()})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "commit": commit or _git_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _git_commit() -> str:
    root = Path(__file__).parent.parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
