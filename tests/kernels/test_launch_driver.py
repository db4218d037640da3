"""What ``cuLaunchKernelEx`` is given: read back from memory by a function in its place, so no GPU is needed."""

import ctypes
import struct
import threading
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qgemm.kernels.launch import context, driver
from qgemm.kernels.launch.driver import DriverLaunch, Program, driver_launch

Seen = namedtuple("Seen", "config attributes function arguments scratch")


def recorder(kinds: str, seen: list[Seen], error: int = 0) -> Any:
    """A ``cuLaunchKernelEx`` for a kernel whose arguments are of ``kinds``: struct's letters, m for a tensor map."""

    def launch(config: ctypes.c_void_p, function: ctypes.c_void_p, parameters: ctypes.c_void_p, extra: None) -> int:
        assert extra is None
        copied = driver._Config.from_buffer_copy(ctypes.string_at(config, ctypes.sizeof(driver._Config)))
        addresses = (ctypes.c_void_p * (len(kinds) + 2)).from_address(parameters.value)
        arguments = [
            ctypes.string_at(address, 128)
            if kind == "m"
            else struct.unpack(kind, ctypes.string_at(address, struct.calcsize(kind)))[0]
            for kind, address in zip(kinds, addresses, strict=False)
        ]
        scratch = [struct.unpack("Q", ctypes.string_at(address, 8))[0] for address in addresses[len(kinds) :]]
        seen.append(Seen(copied, attributes_of(copied), function.value, arguments, scratch))
        return error

    return launch


def attributes_of(config: driver._Config) -> list[tuple[int, ...]]:
    """The id and three ints of each."""
    size = ctypes.sizeof(driver._Attribute)
    memory = ctypes.string_at(config.attributes, size * config.num_attributes)
    return [struct.unpack_from("i4x3i", memory, size * index) for index in range(config.num_attributes)]


def program(*arguments: Any, **changed: Any) -> Program:
    facts = {"function": 7, "grid": 66, "threads": 256, "shared_memory": 1000, "pdl": False, **changed}
    return Program(**facts, arguments=arguments)


def test_structures_are_those_of_cuda() -> None:
    # sizeof and offsetof in cuda.h on 64-bit systems.
    assert ctypes.sizeof(driver._Config) == 56
    assert driver._Config.shared_memory.offset == 24
    assert driver._Config.stream.offset == 32
    assert driver._Config.num_attributes.offset == 48
    assert ctypes.sizeof(driver._Attribute) == 72
    assert driver._Attribute.value.offset == 8


def test_the_driver_reads_every_argument_in_order() -> None:
    def maps(pointer: int) -> bytes:
        return bytes([pointer % 251]) * 128

    seen: list[Seen] = []
    arguments = (None, struct.pack("<i", -5), maps, struct.pack("<q", 2**40), None, maps)
    launch = DriverLaunch(program(*arguments), recorder("QimqQm", seen))
    launch(11, (2**63, 300, 2**20, 4))
    launch(12, (1, 2, 3, 4))
    assert [call.config.stream for call in seen] == [11, 12]
    assert seen[0].arguments == [2**63, -5, bytes([300 % 251]) * 128, 2**40, 2**20, bytes([4]) * 128]
    assert seen[1].arguments == [1, -5, bytes([2]) * 128, 2**40, 3, bytes([4]) * 128]
    for call in seen:
        assert call.function == 7
        assert call.scratch == [0, 0]
        assert list(call.config.grid) == [66, 1, 1]
        assert list(call.config.block) == [256, 1, 1]
        assert call.config.shared_memory == 1000
        assert call.attributes == []


def test_arguments_are_kept_by_address_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MAX_PACKED_ARGUMENTS", 3)
    encoded: list[int] = []

    def maps(pointer: int) -> bytes:
        encoded.append(pointer)
        return bytes([pointer]) * 128

    seen: list[Seen] = []
    launch = DriverLaunch(program(None, maps), recorder("Qm", seen))
    calls = [(address, address + 1) for address in (1, 2, 1, 1, 2, 3, 4, 5, 1)]
    for pointers in calls:
        launch(0, pointers)
        assert len(launch._packed) <= 3
    assert [call.arguments for call in seen] == [[a, bytes([b]) * 128] for a, b in calls]
    assert encoded == [2, 3, 4, 5, 6, 2]


@pytest.mark.parametrize(
    ("changed", "attributes"),
    [
        ({"pdl": True}, [(6, 1, 0, 0)]),
        ({"cluster": 3}, [(4, 3, 1, 1)]),
        ({"pdl": True, "cluster": 2}, [(6, 1, 0, 0), (4, 2, 1, 1)]),
    ],
)
def test_attributes(changed: dict[str, Any], attributes: list[tuple[int, ...]]) -> None:
    seen: list[Seen] = []
    DriverLaunch(program(**changed), recorder("", seen))(0, ())
    assert seen[0].attributes == attributes


def test_the_wrong_number_of_pointers_is_an_error() -> None:
    launch = DriverLaunch(program(None, None), recorder("QQ", []))
    with pytest.raises(struct.error):
        launch(0, (1,))


def test_threads_have_memory_of_their_own() -> None:
    """Two threads in the driver at once: what the first one's kernel is given isn't changed by the second."""
    seen: list[Seen] = []
    record = recorder("Q", seen)
    both_inside = threading.Barrier(2, timeout=20)

    def launch(*arguments: Any) -> int:
        both_inside.wait()
        return record(*arguments)

    shared = DriverLaunch(program(None), launch)
    threads = [threading.Thread(target=shared, args=(stream, (100 + stream,))) for stream in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((call.config.stream, call.arguments[0]) for call in seen) == [(1, 101), (2, 102)]


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[bool] = []
    monkeypatch.setattr(context, "bind_context", lambda: bound.append(True))
    seen: list[Seen] = []

    def launch(*arguments: Any) -> int:
        return recorder("Q", seen, error=0 if bound else context.INVALID_CONTEXT)(*arguments)

    DriverLaunch(program(None), launch)(0, (5,))
    assert bound == [True]
    assert len(seen) == 2


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_describe", lambda error: f"error {error}")
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed: error 700"):
        DriverLaunch(program(None), recorder("Q", [], error=700))(0, (5,))


METADATA = {
    "target": SimpleNamespace(backend="cuda", warp_size=32),
    "num_warps": 4,
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "shared": 512,
}


def compiled(signature: dict[str, str], **changed: Any) -> Any:
    metadata = SimpleNamespace(**{**METADATA, **changed})
    return SimpleNamespace(metadata=metadata, function=9, src=SimpleNamespace(signature=signature))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """What a driver of one pointer, an i32 and an i64 was given."""
    seen: list[Seen] = []
    libcuda = SimpleNamespace(
        cuLaunchKernelEx=recorder("Qiq", seen),
        cuFuncGetParamInfo=parameter_sizes(8, 4, 8, 8, 8),
        cuOccupancyMaxActiveClusters=room_for(5),
    )
    monkeypatch.setattr(driver, "libcuda", lambda: libcuda)
    return seen


def parameter_sizes(*sizes: int) -> Any:
    """A ``cuFuncGetParamInfo`` of a kernel with parameters of these sizes."""

    def get(function: ctypes.c_void_p, index: ctypes.c_size_t, offset: Any, size: Any) -> int:
        if index.value >= len(sizes):
            return 1
        size._obj.value = sizes[index.value]
        return 0

    return get


def room_for(clusters: int, error: int = 0) -> Any:
    """A ``cuOccupancyMaxActiveClusters`` of a device where 10 programs run at a time, but no more than ``clusters``."""

    def get(found: Any, function: ctypes.c_void_p, config: Any) -> int:
        assert function.value == 9
        (attribute,) = attributes_of(config._obj)
        assert attribute[::2] == (4, 1)
        found._obj.value = min(clusters, 10 // attribute[1])
        return error

    return get


SIGNATURE = {"x": "*fp32", "none": "constexpr", "M": "i32", "one": "constexpr", "stride": "i64", "BLOCK": "constexpr"}
ARGUMENTS = (torch.empty(1), None, 12, 1, 2**33, 64)


def test_what_triton_compiled_is_launched(launched: list[Seen]) -> None:
    launch = driver_launch(compiled(SIGNATURE), 3, ARGUMENTS)
    assert launch is not None
    launch(1, (4096,))
    assert launched[0].arguments == [4096, 12, 2**33]
    assert (launched[0].function, launched[0].config.block[0], launched[0].config.shared_memory) == (9, 128, 512)


@pytest.mark.parametrize(
    ("grid", "cluster", "room", "given"),
    [
        (10, 2, room_for(5), [(4, 2, 1, 1)]),
        (9, 3, room_for(5), [(4, 3, 1, 1)]),
        (10, 1, room_for(5), []),
        (9, 2, room_for(5), []),  # an odd one left
        (10, 2, room_for(4), []),  # the last would run after the others
        (12, 3, room_for(5), []),
        (10, 2, room_for(5, error=1), []),
    ],
)
def test_clusters_that_run_at_once(
    grid: int, cluster: int, room: Any, given: list[tuple[int, ...]], launched: list[Seen]
) -> None:
    driver.libcuda().cuOccupancyMaxActiveClusters = room
    launch = driver_launch(compiled(SIGNATURE), grid, ARGUMENTS, cluster)
    assert launch is not None
    launch(1, (4096,))
    assert launched[0].attributes == given
    assert launched[0].config.grid[0] == grid


def test_clusters_are_asked_for_in_a_thread_without_a_context(
    launched: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another thread has loaded the kernel, this one's first call of the driver asks for room."""
    answers = [room_for(5, error=context.INVALID_CONTEXT), room_for(5)]
    monkeypatch.setattr(context, "bind_context", lambda: answers.pop(0))
    driver.libcuda().cuOccupancyMaxActiveClusters = lambda *arguments: answers[0](*arguments)
    launch = driver_launch(compiled(SIGNATURE), 10, ARGUMENTS, 2)
    assert launch is not None
    launch(1, (4096,))
    assert launched[0].attributes == [(4, 2, 1, 1)]


@pytest.mark.parametrize(
    "changed",
    [
        {"target": SimpleNamespace(backend="hip", warp_size=64)},
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 16},
        {"profile_scratch_size": 16},
        {"shared": 227 * 1024 + 1},
        {"instrumentation_mode": "gsan"},
    ],
)
def test_what_only_triton_can_launch(changed: dict[str, Any], launched: list[Seen]) -> None:
    assert driver_launch(compiled(SIGNATURE, **changed), 3, ARGUMENTS) is None


def test_what_a_version_of_triton_leaves_out_or_adds(launched: list[Seen]) -> None:
    for name in METADATA:
        without = compiled(SIGNATURE)
        delattr(without.metadata, name)
        assert driver_launch(without, 3, ARGUMENTS) is None, name
    assert driver_launch(compiled({**SIGNATURE, "M": "fp32"}), 3, ARGUMENTS) is None
    assert driver_launch(compiled({**SIGNATURE, "added": "*i8"}), 3, ARGUMENTS) is None
    assert driver_launch(compiled({**SIGNATURE, "M": "tensordesc<i8[64, 128]>"}), 3, ARGUMENTS) is None


@pytest.mark.parametrize("sizes", [(), (8, 4, 8), (8, 4, 8, 8), (8, 4, 8, 8, 8, 8), (8, 8, 8, 8, 8)])
def test_parameters_that_the_driver_knows_otherwise(sizes: tuple[int, ...], launched: list[Seen]) -> None:
    """A version of Triton that adds parameters of its own, or leaves some out."""
    driver.libcuda().cuFuncGetParamInfo = parameter_sizes(*sizes)
    assert driver_launch(compiled(SIGNATURE), 3, ARGUMENTS) is None
