"""vLLM's platform for CPUs, with ranks in Ray. Each of vLLM's processes imports it (``vllm_ray``)."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """A rank takes one of what Ray has as GPUs, as vLLM's ranks on GPUs do. Ray doesn't look for any."""

    ray_device_key = "GPU"


def qualified_name() -> str:
    """What vLLM asks a plugin for a platform for."""
    return f"{__name__}.{RayCpuPlatform.__name__}"
