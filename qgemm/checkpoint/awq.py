"""Checkpoints of AWQ (AutoAWQ's version ``gemm``): 4-bit weights in groups, mostly with zero points.

``packed_layers.py`` has the layout. What activations' sizes said about the weights is in the weights of the layers
before; nothing in the files is left to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qgemm.checkpoint.cache_scales import asks_for_cache, leave_to_cache
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import unsupported
from qgemm.checkpoint.gptq import number
from qgemm.checkpoint.packed_layers import Said, read_packed
from qgemm.checkpoint.safetensors_file import StoredTensor

QUANT_METHOD = "awq"
CONFIG_FILE = "quant_config.json"
"""Where older versions say what ``quantization_config`` says now."""

_VERSIONS = ("gemm", "exllama")
"""Those with the same tensors, for two kernels."""


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """The contents of a checkpoint with ``quantization_config`` and tensors such as these.

    Raises ``CheckpointError`` for the versions that lay weights out for other kernels (``gemv``).
    """
    version = quantization.get("version", "gemm")
    if not isinstance(version, str) or version.lower() not in _VERSIONS:
        raise unsupported(f"{config_path}: AWQ's version is {version!r}; qgemm reads 'gemm'")
    bits = number(quantization, ("bits", "w_bit"), config_path, default=4)
    size = number(quantization, ("group_size", "q_group_size"), config_path, default=-1)
    said = Said("AWQ", bits, size, quantization.get("zero_point", True) is not True, ("awq",))
    contents = read_packed(said, stored, config_path)
    leave_to_cache(contents, asks_for_cache(quantization))
    return contents
