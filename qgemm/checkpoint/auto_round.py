"""Checkpoints of AutoRound in its own format: fp8, and 4- or 8-bit weights whose scales may be negative.

Tensors have GPTQ's layout without a ``g_idx``, or AWQ's, according to ``packing_format``, or to ``backend`` in files
from before there was a ``packing_format``. If that says gptq, GPTQ's layout is of version 1; otherwise
(``auto_round:exllamav2``) zero points are stored unchanged. ``packed_layers.py`` describes both layouts. Layers in fp8
are those of ``fp8.py``, or have only fp8 weights. Checkpoints that AutoRound exports as ``gptq``, ``awq`` or
``compressed-tensors`` have that format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qgemm.checkpoint import fp8
from qgemm.checkpoint.cache_scales import leave_to_cache
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import unsupported
from qgemm.checkpoint.float_layers import note_fp8
from qgemm.checkpoint.gptq import number
from qgemm.checkpoint.packed_layers import Said, layout_in, read_packed
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import split_name
from qgemm.scheme import resolve_scheme

QUANT_METHOD = "auto-round"
OLD_METHOD = "intel/auto-round"
_GPTQ = "auto_round:auto_gptq"
_FP8 = ("fp", "fp8", "fp8_e4m3")
# The layout, and whether GPTQ's zero points are stored minus 1.
_PACKINGS = {
    **dict.fromkeys(("gptq", "auto_gptq", "auto"), ("gptq", True)),
    **dict.fromkeys(("awq", "auto_awq"), ("awq", True)),
    **dict.fromkeys(("auto_round", "exllamav2", "triton", "tritonv2"), ("gptq", False)),
}


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint from its ``quantization_config`` and stored tensors.

    Raises ``CheckpointError`` for data types other than whole numbers and fp8, and for quantized activations with
    weights in whole numbers.
    """
    exceptions = quantization.get("extra_config")
    exceptions = exceptions if isinstance(exceptions, dict) else {}
    own_settings = {layer: own for layer, own in exceptions.items() if isinstance(own, dict)}
    if quantization.get("data_type") in _FP8 and quantization.get("bits") == 8:
        for layer, own in own_settings.items():
            if own.get("bits") not in (16, 32) and not own.items() <= quantization.items():
                raise unsupported(f"{config_path}: extra_config of {layer!r} has another kind than its fp8")
        return _read_fp8(quantization, stored, config_path)
    _check(quantization, str(config_path))
    for layer, own in own_settings.items():
        _check(own, f"{config_path}: extra_config of {layer!r}")
    packing = _packing_of(quantization)
    layout, is_version_1 = _PACKINGS.get(_own_spelling(packing).removeprefix("auto_round:"), ("", False))
    if not layout:
        raise unsupported(
            f"{config_path}: packing_format is {packing!r}; qgemm reads 'auto_round', 'auto_round:auto_gptq' and "
            "'auto_round:auto_awq'"
        )
    bits = number(quantization, ("bits",), config_path)
    size = number(quantization, ("group_size",), config_path, default=-1)
    found = layout_in(stored)
    said = Said("AutoRound", bits, size, quantization.get("sym", True) is True, (found,), is_version_1)
    contents = read_packed(said, stored, config_path)
    leave_to_cache(contents, quantization)
    if found != layout:
        contents.note(f"packing_format is {packing!r}, but the tensors are laid out as {found.upper()}'s, and read so")
    return contents


def _read_fp8(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint in fp8, whose activations are static, dynamic, or in float."""
    size, size_of_inputs = quantization.get("group_size"), quantization.get("act_group_size", -1)
    blocks = size if isinstance(size, list) else None
    if (act_bits := quantization.get("act_bits")) not in (None, 8, 16, 32):
        raise unsupported(f"{config_path}: act_bits is {act_bits!r}; with fp8 weights qgemm reads 8, and 16 for float")
    if act_bits == 8:
        # One scale per token, or one for all tokens: the former is at least as fine.
        if blocks is None and size_of_inputs not in (-1, 0):
            raise unsupported(f"{config_path}: act_group_size is {size_of_inputs!r}; qgemm has a scale for each token")
        is_static = quantization.get("act_dynamic") is False
        said = {"activation_scheme": "static" if is_static else "dynamic", "weight_block_size": blocks}
        return fp8.read({**quantization, **said}, stored, config_path)
    if blocks is not None:
        raise unsupported(f"{config_path}: group_size is {size!r}; qgemm has no fp8 blocks with activations in float")
    contents = Contents.of_files(stored)
    for name in stored:
        layer, leaf = split_name(name)
        if leaf == "weight_scale":
            note_fp8(contents, layer, resolve_scheme("fp8-weight"))
    leave_to_cache(contents, quantization)
    return contents


def _packing_of(quantization: dict[str, Any]) -> Any:
    """The ``packing_format``; in old files without one, the ``backend``, if it says how layers are packed."""
    if (packing := quantization.get("packing_format")) is not None:
        return packing
    backend = quantization.get("backend")
    own = _own_spelling(backend)
    is_its_own = own.startswith("auto_round:") and "gptq" not in own and "awq" not in own
    return backend if is_its_own else _GPTQ


def _own_spelling(name: Any) -> str:
    """Normalizes a packing or backend: early versions of the library wrote ``autoround`` or ``auto-round``."""
    first, colon, rest = str(name).partition(":")
    return ("auto_round" if first in ("autoround", "auto-round") else first) + colon + rest


def _check(values: dict[str, Any], where: str) -> None:
    """Raises ``CheckpointError`` for layers that qgemm doesn't compute; those of 16 bits are in float."""
    if (act_bits := values.get("act_bits")) not in (None, 16, 32):
        raise unsupported(f"{where}: act_bits is {act_bits!r}; with int weights qgemm reads activations in float, 16")
    kind = values.get("data_type", "int")
    if kind not in ("int", "int_sym", "int_asym") and values.get("bits") not in (16, 32):
        raise unsupported(f"{where}: data_type is {kind!r}; qgemm reads AutoRound's 'int', and 'fp' of 8 bits")
