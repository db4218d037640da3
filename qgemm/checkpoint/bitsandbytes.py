"""Checkpoints of bitsandbytes in int8 (``load_in_8bit``), as transformers saves them.

``bitsandbytes_4bit.py`` reads those in 4 bits.

``<layer>.weight``: int8 ``[N, K]``, also for transformers' ``Conv1D``, whose own weight is ``[K, N]``. ``<layer>.SCB``:
float32 ``[N]``, the largest absolute value of each row, so that the scale is ``SCB / 127``. ``<layer>.weight_format``:
uint8, 0 for row order, the only one that its present versions write.

bitsandbytes computes columns of activations above ``llm_int8_threshold`` in 16 bits. qgemm doesn't: it computes all
columns in int8, each row with its own scale, and a note says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint import bitsandbytes_4bit
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import StoredTensor, unfit
from qgemm.checkpoint.tensors import split_name
from qgemm.numerics.formats import INT8, MIN_SCALE
from qgemm.scheme import SCHEMES

QUANT_METHOD = "bitsandbytes"
_THRESHOLD = 6.0  # transformers' default


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint from its ``quantization_config`` and stored tensors.

    Raises ``CheckpointError``, naming the layer, for formats other than int8, nf4 and fp4.
    """
    threshold = quantization.get("llm_int8_threshold", _THRESHOLD)
    if type(threshold) not in (int, float):
        raise CheckpointError(f"{config_path}: llm_int8_threshold is {threshold!r}; it must be a number")
    contents = Contents.of_files(stored)
    for name, tensor in stored.items():
        layer, leaf = split_name(name)
        if leaf == "SCB":
            weight = stored.get(f"{layer}.weight")
            if weight is None or weight.dtype != INT8.storage or len(weight.shape) != 2:
                raise CheckpointError(f"{tensor.path}: {name} belongs to a weight that is missing or not int8, [N, K]")
            if tensor.dtype != torch.float32 or tensor.shape != weight.shape[:1]:
                raise unfit(tensor.path, name, tensor, f"torch.float32, [{weight.shape[0]}]")
            contents.manifest.layers[layer] = SCHEMES["int8"]
            contents.convert(f"{layer}.weight_scale", name, tensor.shape, _to_scale)
        elif leaf == "weight_format" and f"{layer}.SCB" in stored:
            if tensor.dtype != torch.uint8 or tensor.shape not in ((), (1,)):
                raise CheckpointError(f"{tensor.path}: {name} is {tensor}, not a uint8 number")
            problem = "the weight is laid out for one kind of GPU, as old versions of bitsandbytes did; save it again"
            contents.must_be_zero(name, problem)
    if contents.manifest.layers and threshold > 0:  # 0 means no outliers
        contents.note(
            f"all activations are computed in int8; bitsandbytes computes columns with values above {threshold:g} "
            "(llm_int8_threshold) in 16 bits, so that it loses less where a model has such outliers"
        )
    bitsandbytes_4bit.note_layers(contents)
    return contents


def _to_scale(absmax: Tensor) -> Tensor:
    # A row of zeros has 0; the smallest positive scale gives the same values.
    return torch.where(absmax == 0, MIN_SCALE, absmax / INT8.steps)
