"""GGUF files for tests, as the package gguf writes them: blocks with random values, and whole tiny models."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from torch import nn

from qgemm.nn.linear_layer import is_conv1d

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array | tuple[str, Array]]
_NEVER_QUANTIZED = re.compile(r"inp\.|norm|conv|ssm_x|ssm_dt|position|rel_b")
# Where the float16 numbers of a block begin.
HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,)},
    **{"IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "Q1_0": (0,), "NVFP4": ()},
}


def random_blocks(kind: str, *shape: int, seed: int = 0, std: float = 0.02) -> Array:
    """Bytes of a tensor of ``shape``, of values around ``std``: random, but for the factors of blocks."""
    rng = np.random.default_rng(seed)
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, nbytes), dtype=np.uint8)
    # The whole numbers that the factors multiply, roughly.
    size = {"Q2_K": 16, "Q3_K": 40, "Q4_K": 256, "Q5_K": 512, "Q6_K": 1000, "IQ4_NL": 60, "IQ4_XS": 800, "Q8_0": 70}
    size |= {"IQ2_XXS": 60, "IQ2_XS": 60, "IQ2_S": 60, "IQ3_XXS": 140, "IQ3_S": 130}
    for start in HALVES.get(kind, ()):  # none of a type that qgemm doesn't read
        factor = rng.uniform(0.5, 2, blocks.shape[:-1]) * rng.choice((-1, 1), blocks.shape[:-1])
        halves = (std / size.get(kind, 8) * factor).astype("<f2")
        blocks[..., start : start + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = 119 + blocks[..., 0] % 4
    if kind == "NVFP4":  # scales of 2^-6 to 2^-5
        blocks[..., :4] = blocks[..., :4] & 7 | 8
    if kind == "IQ1_M":  # the exponent of a factor of about 2^-8, in parts
        blocks[..., 53::2] = blocks[..., 53::2] & 15 | np.array([0x00, 0x20], dtype=np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_file(path: Path, architecture: str, settings: dict[str, Any], tensors: Tensors) -> Path:
    """Writes ``tensors`` by name, floats or a type and its bytes.

    ``settings``: numbers, texts and lists by name, which are of ``architecture`` if they don't say of what else.
    """
    writer = GGUFWriter(path, architecture)
    writer.data_alignment = settings.get("general.alignment", writer.data_alignment)
    for name, value in settings.items():
        whole = name if name.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(whole, value)
        else:
            adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            adders[type(value)](whole, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[1], raw_dtype=GGMLQuantizationType[tensor[0]])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str) -> bytes:
    """As files hold it."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def setting(name: str, kind: int, value: bytes) -> bytes:
    """One of a file, of a ``kind`` by its number."""
    return text(name) + struct.pack("<I", kind) + value


def entry(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def whole(*parts: bytes, version: int = 3, settings: int = 0, tensors: int = 1, body: int = 4096) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, settings) + b"".join(parts)
    return header + bytes(-len(header) % 32 + body)


def random_tensors(model: nn.Module, architecture: str, kind: str) -> Tensors:
    """Random tensors of the names and shapes that llama.cpp's converter gives those of ``model``, of transformers.

    Matrices are of type ``kind``, but for those that are never quantized.
    """
    kinds = {name: each for each, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    rng = np.random.default_rng(0)
    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        if name in (model.all_tied_weights_keys or {}):
            continue
        for own, shape in _in_file(names, model, name, tuple(tensor.shape)):
            if own.endswith(".weight") and len(shape) > 1 and not _NEVER_QUANTIZED.search(own):
                found[own] = kind, random_blocks(kind, *shape, seed=len(found))
            else:
                values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
                found[own] = -np.exp(values) if "ssm_a" in own else values + np.float32("norm" in own)
    return found


def _in_file(names: Any, model: nn.Module, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes in a file of the model's tensor ``name``."""
    if name.endswith("experts.gate_up_proj"):
        block, half = name.split(".")[2], (shape[0], shape[1] // 2, shape[2])
        return [(f"blk.{block}.ffn_{part}_exps.weight", half) for part in ("gate", "up")]
    stem, dot, suffix = name.rpartition(".")
    if name.endswith("e_score_correction_bias"):
        return [(f"blk.{name.split('.')[2]}.exp_probs_b.bias", shape)]
    if suffix not in ("weight", "bias"):
        stem, dot, suffix = (name, ".", "weight") if "experts" in name else (name, "", "")
    own = names.get_name(stem) or names.get_name(stem.partition(".")[2])
    assert own is not None, name
    if suffix == "weight" and "experts" not in name and is_conv1d(model.get_submodule(stem)):
        shape = shape[::-1]
    if "conv" in own and len(shape) == 3:
        shape = (shape[0], shape[2])
    return [(f"{own}{dot}{suffix}", shape[1:] if own.endswith("gate_inp_shexp") else shape)]
