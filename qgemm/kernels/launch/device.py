"""``DeviceLimits``: the limits that a device sets for kernels, independent of any operation."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of one device: counts and bytes, per SM (compute unit on AMD)."""

    num_sms: int
    shared_memory: int
    max_threads: int = 2048
    warp_size: int = 32
    num_xcds: int = 1
    hopper: bool = False
    """Whether it has ``wgmma`` and TMA: compute capability 9.0."""
    hopper_rows: int = 16
    """The minimum number of rows of a block of A in Hopper's kernel, whose instructions read 64."""
    pdl: bool = False
    """Whether it has programmatic dependent launch: compute capability 9.0 and later."""
    rounds_fp8: bool = False
    """Whether an instruction rounds to e4m3: compute capability 8.9 and later."""
    multiplies_fp8: bool = False
    """Whether Triton has products of e4m3 on it: compute capability 8.9 and later, and CDNA 3 and 4."""


INTERPRETER = DeviceLimits(num_sms=4, shared_memory=232_448)
"""Used where kernels are interpreted on the CPU."""

_CUS_PER_XCD = {"gfx942": 38, "gfx950": 32}


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a CUDA or ROCm device, read from the driver once; ``INTERPRETER`` for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    num_sms = properties.multi_processor_count
    chip = getattr(properties, "gcnArchName", "").split(":")[0]
    return DeviceLimits(
        num_sms=num_sms,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        max_threads=properties.max_threads_per_multi_processor,
        warp_size=properties.warp_size,
        num_xcds=max(1, num_sms // _CUS_PER_XCD[chip]) if chip in _CUS_PER_XCD else 1,
        hopper=torch.version.hip is None and (properties.major, properties.minor) == (9, 0),
        hopper_rows=hopper_rows(),
        pdl=torch.version.hip is None and properties.major >= 9,
        rounds_fp8=torch.version.hip is None and (properties.major, properties.minor) >= (8, 9),
        multiplies_fp8=chip in _CUS_PER_XCD if torch.version.hip else (properties.major, properties.minor) >= (8, 9),
    )


def hopper_rows() -> int:
    """``DeviceLimits.hopper_rows``. Triton 3.8 has no views for smaller blocks: see ``Ring.rows_to_multiply``."""
    import triton

    return 64 if triton.__version__.startswith("3.8.") else 16
