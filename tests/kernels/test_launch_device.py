"""``DeviceLimits``: what PyTorch says of a device, as kernels ask for it."""

from types import SimpleNamespace

import pytest
import torch

from qgemm.kernels.gemm.config import CANDIDATES, is_valid
from qgemm.kernels.launch.device import INTERPRETER, DeviceLimits, device_limits, hopper_rows


def test_device_limits(device: torch.device) -> None:
    limits = device_limits(device)
    assert limits is device_limits(device)  # read once
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        assert limits.num_sms == properties.multi_processor_count
        assert limits.shared_memory >= 48 * 1024
    else:
        assert limits is INTERPRETER


FP8 = {"rounds_fp8": True, "multiplies_fp8": True}
# What PyTorch says of devices: multiprocessors, shared memory, threads of a multiprocessor, threads of a warp.
REPORTED = {
    "H100": ((9, 0), (132, 232_448, 2048, 32), DeviceLimits(132, 232_448, hopper=True, pdl=True, **FP8)),
    "B200": ((10, 0), (148, 232_448, 2048, 32), DeviceLimits(148, 232_448, pdl=True, **FP8)),
    "RTX 5090": ((12, 0), (170, 101_376, 1536, 32), DeviceLimits(170, 101_376, 1536, pdl=True, **FP8)),
    "RTX 4090": ((8, 9), (128, 101_376, 1536, 32), DeviceLimits(128, 101_376, 1536, **FP8)),
    "RTX 3090": ((8, 6), (82, 101_376, 1536, 32), DeviceLimits(82, 101_376, 1536)),
    "gfx942": (
        (9, 4),
        (304, 65_536, 2048, 64),
        DeviceLimits(304, 65_536, warp_size=64, num_xcds=8, multiplies_fp8=True),
    ),
    "gfx950": (
        (9, 5),
        (256, 163_840, 2048, 64),
        DeviceLimits(256, 163_840, warp_size=64, num_xcds=8, multiplies_fp8=True),
    ),
    "gfx90a": ((9, 0), (104, 65_536, 2048, 64), DeviceLimits(104, 65_536, warp_size=64)),
}


@pytest.mark.parametrize("name", REPORTED)
def test_limits_of_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (major, minor), (num_sms, shared_memory, max_threads, warp_size), expected = REPORTED[name]
    amd = name.startswith("gfx")
    properties = SimpleNamespace(
        multi_processor_count=num_sms, shared_memory_per_block_optin=shared_memory, shared_memory_per_block=1,
        max_threads_per_multi_processor=max_threads, warp_size=warp_size, major=major, minor=minor,
    )  # fmt: skip
    if amd:
        properties.gcnArchName = f"{name}:sramecc+:xnack-"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "7.0" if amd else None)
    monkeypatch.setattr("triton.__version__", "3.9.0")
    limits = device_limits.__wrapped__(torch.device("cuda", 0))
    assert limits == expected
    assert any(is_valid(config, 1, limits) for config in CANDIDATES if config.schedule == "specialized") == (
        name == "H100"
    )


@pytest.mark.parametrize(
    ("version", "least"), [("3.6.0", 16), ("3.7.1+git1", 16), ("3.8.0", 64), ("3.9.0", 16), ("3.10.0", 16)]
)
def test_blocks_are_low_but_with_triton_3_8(version: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", version)
    assert hopper_rows() == least
