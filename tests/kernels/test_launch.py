"""``Launch``: which way a call goes, shown with a kernel, a compiler and a driver made up here."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from qgemm.kernels.launch import launch as module
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.tensor_map import TensorMap

Calls = list[tuple[Any, ...]]


class Kernel:
    """Notes what it is called with, and by which way."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> dict[Any, Callable[..., None]]:
        self.calls.append(("compiles", grid, arguments, options))
        return {(*grid, 1, 1): lambda *again: self.calls.append(("Triton", grid, again))}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """On CPU tensors: their device index is None, so that is the current one."""
    noted: Calls = []

    def driver_launch(compiled: Any, grid: int, arguments: Any, cluster: int) -> Callable[..., None]:
        return lambda stream, pointers: noted.append(("driver", stream, list(pointers)))

    monkeypatch.setattr(module, "driver_launch", driver_launch)
    monkeypatch.setattr(module, "INTERPRETING", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return noted


def test_nobody_is_told_of_compilations(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would hand the constants to json.dumps first, which takes no config: vLLM's listener broke kernels so."""
    hooks = "jit_cache_hook", "jit_post_compile_hook"
    for name in hooks:
        monkeypatch.setattr(triton.knobs.runtime, name, lambda **_: None)
    listening = [getattr(triton.knobs.runtime, name) for name in hooks]
    kernel = Kernel(calls)
    warmup, heard = kernel.warmup, []

    def compile_kernel(*arguments: Any, **options: Any) -> Any:
        heard.append([getattr(triton.knobs.runtime, name) for name in hooks])
        return warmup(*arguments, **options)

    kernel.warmup = compile_kernel  # type: ignore[method-assign]
    Launch(kernel, 5, (3, 4), (64, True), num_warps=8)(at(0))
    assert heard == [[None, None]]
    assert [getattr(triton.knobs.runtime, name) for name in hooks] == listening


def at(offset: int) -> Tensor:
    """A tensor ``offset`` bytes beyond a multiple of 16."""
    return torch.zeros(64, dtype=torch.int8)[offset:]


def test_compiled_once_and_run_by_the_driver(calls: Calls) -> None:
    launch = Launch(Kernel(calls), 5, (3, 4), (64, True), num_warps=8, num_stages=3)
    x, y = at(0), at(0)
    assert launch.aligned is None
    for _ in range(3):
        launch(x, None, y)
    options = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}
    assert calls[0] == ("compiles", (5,), (x, None, y, 3, 4, 64, True), options)
    assert calls[1:] == [("driver", 77, [x.data_ptr(), y.data_ptr()])] * 3
    assert launch.aligned is not None


def test_a_variant_for_each_alignment(calls: Calls) -> None:
    launch = Launch(Kernel(calls), 5, (), (), num_warps=4)
    combinations = [(at(1), at(0)), (at(0), at(8)), (at(0), at(0)), (at(3), at(5))]
    for _ in range(3):
        for tensors in combinations:
            launch(*tensors)
            assert (launch.aligned is None) == (len(calls) < 6)
    ways = [call[0] for call in calls]
    assert ways == ["compiles", "driver"] * 4 + ["driver"] * 8
    assert [call[2] for call in calls[8:]] == [[x.data_ptr(), y.data_ptr()] for x, y in combinations] * 2


def test_triton_s_launcher_where_the_driver_can_t(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "driver_launch", lambda *arguments: None)
    launch = Launch(Kernel(calls), 5, (3,), (64,), num_warps=4)
    x = at(0)
    for _ in range(3):
        launch(x)
    assert calls[1:] == [("Triton", (5,), (x, 3, 64))] * 3
    assert launch.aligned is None


def note(metadata: Any) -> None:
    pass


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("replaced", [False, True])
def test_hooks_see_launches(name: str, replaced: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(Kernel(calls), 5, (), (), num_warps=4)
    launch(at(0))
    runtime = triton.knobs.runtime
    with monkeypatch.context() as patch:
        if replaced:  # as code written for older versions of Triton does
            patch.setattr(runtime, name, note)
        else:
            getattr(runtime, name).add(note)
        launch(at(0))
    if not replaced:
        getattr(runtime, name).remove(note)
    launch(at(0))
    monkeypatch.setattr(runtime, name, None)
    launch(at(0))
    assert [call[0] for call in calls] == ["compiles", "driver", "Triton", "driver", "driver"]


@pytest.mark.parametrize("pdl", [False, True])
def test_pdl_where_there_is_such_a_thing(pdl: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_limits", lambda device: DeviceLimits(132, 232_448, pdl=pdl))
    Launch(Kernel(calls), 5, (), (), num_warps=4, pdl=True)(at(0))
    Launch(Kernel(calls), 5, (), (), num_warps=4)(at(0))
    with_pdl, without = (call[3] for call in calls if call[0] == "compiles")
    assert with_pdl.get("launch_pdl", False) == pdl
    assert "launch_pdl" not in without


def test_maps_are_descriptors_for_triton_and_addresses_for_the_driver(calls: Calls) -> None:
    tensor_map = TensorMap(shape=(100, 64), strides=(64, 1), block=(16, 64))
    launch = Launch(Kernel(calls), 5, (), (), num_warps=4, maps={1: tensor_map})
    x, y = at(0), torch.zeros(100, 64, dtype=torch.int8)
    launch(x, y)
    launch(x, y)
    first, descriptor = calls[0][2]
    assert first is x
    assert descriptor.base is y
    assert (descriptor.shape, descriptor.strides, descriptor.block_shape) == ([100, 64], [64, 1], [16, 64])
    assert calls[1] == ("driver", 77, [x.data_ptr(), y.data_ptr()])


def test_another_device_is_made_current(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    class Device:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device.index)

        def __exit__(self, *error: Any) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: (device, current[-1]))
    launch = Launch(Kernel(calls), 5, (), (), num_warps=4)
    for index in (1, 1, 0, 1):
        tensor: Any = SimpleNamespace(device=SimpleNamespace(index=index), data_ptr=lambda: 16)
        launch(tensor)
    assert [call[0] for call in calls] == ["compiles", *["driver"] * 4]
    assert [call[1] for call in calls[1:]] == [(1, 1), (1, 1), (0, 0), (1, 1)]
    assert current == [0]
