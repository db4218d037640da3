"""The mxfp4 experts of GPT-OSS: ``quant_method`` ``mxfp4``.

``<experts>.gate_up_proj_blocks`` uint8 ``[E, 2 * I, H / 32, 16]``, two e2m1 codes in a byte, low bits first;
``<experts>.gate_up_proj_scales`` uint8 ``[E, 2 * I, H / 32]``, ``e`` for ``2^(e - 127)``; the same of ``down_proj``,
``[E, H, I / 32, 16]``. Rows of ``gate_up_proj`` are gate 0, up 0, gate 1, ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.words import unpack_nibbles

QUANT_METHOD = "mxfp4"


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Raises ``CheckpointError``: no layer computes such experts yet."""
    experts = next((name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")), "no tensor")
    raise CheckpointError(f"{config_path}: {experts} holds experts in mxfp4, which qgemm doesn't compute yet")


def decode_experts(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The codes, uint8 ``[E, N, K]``, and the exponents, uint8 ``[E, N, K / 32]``, in the order of the file's rows."""
    return unpack_nibbles(blocks.flatten(2)), scales
