"""Checkpoints of GPTQ (AutoGPTQ, GPTQModel, Optimum): 4- or 8-bit weights, symmetric or not, with ``desc_act`` or not.

``packed_layers.py`` describes the layout. ``checkpoint_format`` is ``"gptq"`` (version 1) or ``"gptq_v2"``. Some files
say the first and contain the second, so a symmetric layer's zero points are trusted instead. Bits and group sizes of
single layers (``dynamic``) follow from their shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qgemm.checkpoint.cache_scales import leave_to_cache
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.packed_layers import Said, read_packed
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import split_name

QUANT_METHOD = "gptq"
CONFIG_FILE = "quantize_config.json"
"""The older names of keys in ``quantization_config``."""

VERSIONS = ("gptq", "gptq_v2")


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint from its ``quantization_config`` and stored tensors.

    Raises ``CheckpointError``, naming the layer, for bits other than 4 and 8, for layouts made for a single kernel, and
    for a layer that lacks the ``g_idx`` that ``desc_act`` promises.
    """
    version = quantization.get("checkpoint_format") or quantization.get("format") or VERSIONS[0]
    if version not in VERSIONS or quantization.get("is_marlin_format") is True:
        name = "marlin" if quantization.get("is_marlin_format") is True else version
        raise unsupported(
            f"{config_path}: checkpoint_format is {name!r}; qgemm reads {' and '.join(map(repr, VERSIONS))}"
        )
    if quantization.get("pack_dtype") not in (None, "int32"):
        dtype = quantization["pack_dtype"]
        raise unsupported(f"{config_path}: pack_dtype is {dtype!r}; qgemm reads 'int32'")
    bits = number(quantization, ("bits",), config_path)
    size = number(quantization, ("group_size",), config_path, default=-1)
    symmetric = quantization.get("sym", True) is True
    orders = quantization.get("desc_act") is True
    said = Said("GPTQ", bits, size, symmetric, ("gptq",), is_version_1=version == VERSIONS[0], orders=orders)
    if orders:
        _check_has_order(stored)
    contents = read_packed(said, stored, config_path)
    leave_to_cache(contents, quantization)
    return contents


def _check_has_order(stored: dict[str, StoredTensor]) -> None:
    """Raises ``CheckpointError`` for a layer with groups of columns that doesn't say which columns they are."""
    for name, scales in stored.items():
        layer, leaf = split_name(name)
        if leaf == "scales" and scales.shape[:1] > (1,) and f"{layer}.g_idx" not in stored:
            raise CheckpointError(
                f"{scales.path}: desc_act is true, but layer {layer} has no g_idx, the group of each column; the files "
                "are damaged: get them again"
            )


def read_without_config(stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of stored tensors that no config describes; raises as ``read`` does.

    Also raises ``CheckpointError`` if there are no symmetric layers, whose zero points tell the version.
    """
    return read_packed(Said("GPTQ", 4, -1, True, ("gptq",), is_version_1=None), stored, config_path)


def number(quantization: dict[str, Any], names: tuple[str, ...], config_path: Path, default: int | None = None) -> int:
    """The whole number under the first of ``names`` that the config has."""
    name = next((name for name in names if quantization.get(name) is not None), names[0])
    value = default if quantization.get(name) is None else quantization[name]
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value < 2**31:
        raise CheckpointError(f"{config_path}: {name} is {value!r}; it must be a whole number")
    return value
