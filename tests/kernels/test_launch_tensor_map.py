"""Tensor maps: what the driver is asked to encode, that it is asked once, and on a GPU what a kernel reads by them."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from qgemm.kernels.launch import context, tensor_map
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.tensor_map import EncodedMaps, TensorMap

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU that copies by tensor maps",
)
METADATA = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 32], "fp4_padded": False}


class Driver:
    """In place of libcuda: notes what it is asked to encode, and writes the address, then bits, as the map."""

    def __init__(self, version: int = 13020, error: int = 0) -> None:
        self.version, self.error = version, error
        self.asked: list[dict[str, Any]] = []

    def cuTensorMapEncodeTiled(
        self, memory: Any, kind: int, rank: int, address: Any, shape: Any, strides: Any, box: Any, steps: Any,
        interleave: int, swizzle: int, promotion: int, fill: int,
    ) -> int:  # fmt: skip
        assert memory.value % 64 == 0
        lists = {"shape": list(shape), "strides": list(strides), "box": list(box), "steps": list(steps)}
        numbers = {"kind": kind, "rank": rank, "swizzle": swizzle, "fill": fill, "interleave": interleave}
        self.asked.append({"address": address.value, **lists, **numbers})
        (ctypes.c_uint64 * 16).from_address(memory.value)[:] = [address.value, *[2**64 - 1] * 15]
        return self.error

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0


def descriptor(*shape: int) -> Any:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return SimpleNamespace(shape=list(shape), strides=strides)


def test_what_the_driver_is_asked() -> None:
    driver = Driver()
    EncodedMaps(descriptor(1000, 512), METADATA, driver)(4096)
    wanted = {"shape": [512, 1000], "strides": [1024, 0], "box": [32, 64], "steps": [1, 1]}
    assert driver.asked == [
        # bfloat16 is 10 among PTX's types and 9 among CUDA's. The last stride is not read.
        {"address": 4096, **wanted, "kind": 9, "rank": 2, "swizzle": 3, "fill": 0, "interleave": 0}
    ]


@pytest.mark.parametrize(("element", "wanted"), [(0, 0), (6, 6), (7, 7), (8, 10), (9, 8), (10, 9)])
def test_element_types(element: int, wanted: int) -> None:
    driver = Driver()
    EncodedMaps(descriptor(8, 64), {**METADATA, "elem_type": element}, driver)(4096)
    assert driver.asked[0]["kind"] == wanted


def test_encoded_once_for_an_address() -> None:
    driver = Driver()
    maps = EncodedMaps(descriptor(1000, 512), METADATA, driver)
    one, two, again = maps(4096), maps(8192), maps(4096)
    assert (len(one), one[:8], two[:8]) == (128, (4096).to_bytes(8, "little"), (8192).to_bytes(8, "little"))
    assert again is one
    assert len(driver.asked) == 2


def test_a_bounded_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "MAX_MAPS", 4)
    maps = EncodedMaps(descriptor(1000, 512), METADATA, Driver())
    for address in range(64, 4096, 64):
        assert maps(address)[:8] == address.to_bytes(8, "little")
        assert len(maps._maps) <= 4


@pytest.mark.parametrize(
    ("version", "shape", "cleared"),
    [
        (13010, (127, 512), True),
        (13010, (128, 512), False),  # 128 KiB and more
        (13020, (127, 512), False),
    ],
)
def test_the_bit_that_small_maps_must_not_have(version: int, shape: tuple[int, int], cleared: bool) -> None:
    encoded = EncodedMaps(descriptor(*shape), METADATA, Driver(version))(4096)
    assert int.from_bytes(encoded[8:16], "little") == 2**64 - 1 - (1 << 21 if cleared else 0)
    assert encoded[16:] == b"\xff" * 112


def test_an_error_of_the_driver_is_raised() -> None:
    maps = EncodedMaps(descriptor(1000, 512), METADATA, Driver(error=1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled failed with 1 .* at 0x1001"):
            maps(0x1001)


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(error=context.INVALID_CONTEXT)
    monkeypatch.setattr(context, "bind_context", lambda: setattr(driver, "error", 0))
    assert EncodedMaps(descriptor(1000, 512), METADATA, driver)(4096)[:8] == (4096).to_bytes(8, "little")
    assert len(driver.asked) == 2


@pytest.mark.parametrize("changed", [{"fp4_padded": True}, {"is_im2col": True}])
def test_other_kinds_of_maps_are_triton_s(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="isn't known here"):
        EncodedMaps(descriptor(1000, 512), {**METADATA, **changed}, Driver())


@triton.jit
def _copy_kernel(source, out, row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out + offsets, source.load([row, 0]))


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [100, 4000])  # below and above 128 KiB
def test_a_kernel_reads_by_maps(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    start = rows - 36  # the block's last 28 rows are beyond the end: zeros
    tensor_map = TensorMap(shape=(rows, 144), strides=(144, 1), block=(64, 64))
    launch = Launch(_copy_kernel, 1, (start,), (64, 64), num_warps=4, maps={0: tensor_map})
    tensors = [torch.randint(-100, 100, (rows, 144), device=device).to(dtype) for _ in range(3)]
    for tensor in tensors * 3:
        out = torch.full((64, 64), 77, device=device).to(dtype)
        launch(tensor, out)
        assert torch.equal(out[:36], tensor[start:, :64])
        assert not out[36:].any()
    assert launch.aligned is not None
    assert len(launch.aligned._maps) == 1
