"""Checkpoints of AWQ (AutoAWQ's version ``gemm``): 4-bit weights in groups, mostly with zero points.

``packed_layers.py`` describes the layout. AWQ's scaling by activations is already folded into the weights of preceding
layers, so nothing in the files needs to be applied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qgemm.checkpoint.cache_scales import leave_to_cache
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import unsupported
from qgemm.checkpoint.gptq import number
from qgemm.checkpoint.packed_layers import Said, read_packed
from qgemm.checkpoint.safetensors_file import StoredTensor

QUANT_METHOD = "awq"
CONFIG_FILE = "quant_config.json"
"""The older names of keys in ``quantization_config``."""

_VERSIONS = ("gemm", "exllama")
"""Versions with the same tensors, for two kernels."""


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint from its ``quantization_config`` and stored tensors.

    Raises ``CheckpointError`` for versions that lay out weights for other kernels (``gemv``).
    """
    version = quantization.get("version", "gemm")
    if not isinstance(version, str) or version.lower() not in _VERSIONS:
        raise unsupported(f"{config_path}: AWQ's version is {version!r}; qgemm reads 'gemm'")
    if "pack_method" in quantization and quantization.get("zero_point") is False:
        # AMD Quark's symmetric values are signed there, which no reader of AWQ expects.
        raise unsupported(f"{config_path}: it was written by Quark for AWQ, with zero_point false, in signed values")
    bits = number(quantization, ("bits", "w_bit"), config_path, default=4)
    size = number(quantization, ("group_size", "q_group_size"), config_path, default=-1)
    said = Said("AWQ", bits, size, quantization.get("zero_point", True) is not True, ("awq",))
    contents = read_packed(said, stored, config_path)
    leave_to_cache(contents, quantization)
    return contents
