"""Which devices can be named, with and without a GPU, and how much memory is free there."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import qgemm.device
from qgemm.device import find_device, free_memory, one_thread, useful_threads


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("_two_gpus")
def test_devices_that_are_there() -> None:
    assert find_device("cpu") == find_device(torch.device("cpu")) == torch.device("cpu")
    assert find_device("cuda:0") == torch.device("cuda", 0)
    assert find_device("cuda") == torch.device("cuda", 1)  # torch.cuda.set_device wants a number


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("device", ["cuda:2", "cuda:99", "meta", "gpu", ""])
def test_devices_that_are_not(device: str) -> None:
    with pytest.raises(ValueError, match=f'device is "{device}"; it must be "cpu", or "cuda" .*: cuda:0, cuda:1\\)'):
        find_device(device)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ValueError, match=r'device is "cuda"; it must be "cpu", or "cuda" .* finds a GPU \(here: none\)'
    ):
        find_device("cuda")


CPU = torch.device("cpu")


def system(root: Path, files: dict[str, str], available: int = 1000) -> Path:
    """What Linux shows of a machine with so many KiB available."""
    meminfo = f"MemTotal: 9999 kB\nMemFree: 10 kB\nMemAvailable:   {available} kB\n"
    for name, content in {"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1024_000),
        ({f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "7\n", f"{V2}/memory.stat": ""}, 1024_000),
        (
            {f"{V2}/memory.max": "900\n", f"{V2}/memory.current": "600\n", f"{V2}/memory.stat": "inactive_file 50\n"},
            350,
        ),
        # The limit is that of a group around the process's own.
        (
            {
                "proc/self/cgroup": "0::/a/b:c\n",
                f"{V2}/a/b:c/memory.max": "max\n",
                f"{V2}/a/memory.max": "500\n",
                f"{V2}/a/memory.current": "600\n",
                f"{V2}/a/memory.stat": "anon 500\ninactive_file 150\n",
            },
            50,
        ),
        # A container sees its own group as the root, whatever it is called outside.
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/12\n0::/\n",
                f"{V1}/memory.limit_in_bytes": "900\n",
                f"{V1}/memory.usage_in_bytes": "600\n",
                f"{V1}/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
            },
            350,
        ),
        ({f"{V2}/memory.max": "5\n", f"{V2}/memory.current": "60\n", f"{V2}/memory.stat": "inactive_file 9\n"}, 0),
        ({"proc/meminfo": "MemTotal: 9999 kB\n"}, 0),  # a kernel that doesn't say
    ],
    ids=["no limit", "max", "version 2", "above", "version 1", "over the limit", "unknown"],
)
def test_free_memory_on_linux(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert free_memory(CPU, system(tmp_path, files)) == expected


def test_free_memory_of_an_unknown_system(tmp_path: Path) -> None:
    assert free_memory(CPU, tmp_path) == 0


def test_free_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_memory(torch.device("cuda", 0)) == 1100


def test_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_one_thread_that_starts_while_another_is_inside() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as third:
            inside = ExitStack()
            with one_thread():
                other.submit(inside.enter_context, one_thread()).result()
                with one_thread():
                    pass
                assert torch.get_num_threads() == 1
            assert other.submit(torch.get_num_threads).result() == 1
            other.submit(inside.close).result()
            assert other.submit(torch.get_num_threads).result() == 2
            assert third.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize("faster", [True, False])
def test_threads_are_those_that_help(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qgemm.device, "_several_are_faster", lambda: faster)
    with useful_threads(torch.device("cpu")):
        assert torch.get_num_threads() == (3 if faster else 1)
    assert torch.get_num_threads() == 3
    for context in (useful_threads(torch.device("meta")), useful_threads(torch.device("cuda", 0))):
        with context:
            assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize(("seconds", "is_faster"), [(8e-6, True), (15e-6, False), (2e-3, False)])
def test_threads_that_wait_for_others_do_not_help(
    seconds: float, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def neg_(self: torch.Tensor) -> torch.Tensor:
        now[0] += {1: 16e-6, 3: seconds}[torch.get_num_threads()]
        return self

    monkeypatch.setattr(torch.Tensor, "neg_", neg_)
    monkeypatch.setattr(qgemm.device.time, "perf_counter", lambda: now[0])
    assert qgemm.device._several_are_faster() is is_faster
    assert now[0] < 5e-3, "what is slow is timed once"


@pytest.mark.usefixtures("_three_threads")
def test_nothing_is_timed_for_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qgemm.device, "_several_are_faster", None)
    with torch.device("cpu"), useful_threads(torch.device("cpu")):
        assert torch.get_num_threads() == 3
