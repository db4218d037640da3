"""Checkpoints of MLX (mlx-lm): groups of 1 to 8 bits with ``W = q * scale + bias``, and mxfp4, mxfp8 and nvfp4.

| a layer ``[N, K]`` | tensors |
|---|---|
| affine | ``weight`` uint32 ``[N, K * bits / 32]``: unsigned values along K, low bits first, also across words; |
| | ``scales`` and ``biases``, floats ``[N, K / group size]`` |
| mxfp4, mxfp8 | ``weight`` uint32, e2m1 or e4m3, low bits first; ``scales`` uint8 ``[N, K / 32]``, exponents |
| nvfp4 | ``weight`` uint32, e2m1; ``scales`` uint8 ``[N, K / 16]``, e4m3 |

A mixture's experts are one layer ``[E, N, K]``, in ``switch_mlp`` or, of GPT-OSS, ``experts``. The config says in
``quantization`` how many bits a layer has, in which groups, and in which mode, with exceptions by name. Up to 4 bits
become int4, others int8; with 4 and 8 bits ``q - 8`` or ``q - 128`` are stored, so that ``8 * scale`` or
``128 * scale`` is added to the bias, in float32.

MLX has model code of its own, which stores some models in another form, under the same names in part. So only types
that it is known to store as transformers does are read. transformers' own ``MetalConfig`` stores any model's linear
layers as MLX's affine ones, with ``qbiases`` instead of ``biases`` and the same bits and groups in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents, Made
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.float_layers import check_scale
from qgemm.checkpoint.layout import read_json, settings_of_mlx
from qgemm.checkpoint.packed_layers import scheme_in_file
from qgemm.checkpoint.safetensors_file import StoredTensor, unfit
from qgemm.checkpoint.tensors import BIAS_DTYPES, split_name
from qgemm.checkpoint.words import by_rows, unpack_nibbles
from qgemm.numerics.formats import FP8, INT8
from qgemm.numerics.groups import stored_weight
from qgemm.numerics.packing import pack_codes
from qgemm.scheme import QuantScheme, resolve_scheme

QUANT_METHOD = "mlx"
METAL = "metal"
METAL_BIASES = "qbiases"
WORD = torch.uint32
_AFFINE = "affine"
# By mode: group size and bits if the config doesn't say them. Only those of affine layers may be others.
_DEFAULTS = {_AFFINE: (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
_BITS = (1, 2, 3, 4, 5, 6, 8)
_MOST_EXPERTS = 1 << 16
# What contains a mixture's layers in MLX, and in files for transformers.
_STACKED = ("switch_mlp", "experts")
_OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
MODELS = (
    *("cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "granitemoe"),
    *("helium", "hunyuan_v1_dense", "llama", "ministral3", "mistral", "mixtral", "nemotron", "olmo2", "olmoe", "phi"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
"""The types of models, in the config, that MLX stores as transformers does but for the experts."""


@dataclass(frozen=True)
class _Layer:
    """One layer's ``mode``, bits and shape; ``experts``: how many there are, 0 if it isn't of a mixture.

    ``biases``: what its biases of groups are called.
    """

    name: str
    biases: str
    mode: str
    bits: int
    size: int
    experts: int
    N: int
    K: int

    def scheme(self, path: Path) -> QuantScheme:
        """The scheme that computes it. Raises ``CheckpointError``, naming ``path``, for groups that no scheme has."""
        if self.mode != _AFFINE:
            return resolve_scheme(self.mode)
        bits, size = 4 if self.bits <= 4 else 8, None if self.size == self.K else self.size
        return scheme_in_file(path, self.name, bits, size, symmetric=False, float_zeros=True)

    @property
    def middle(self) -> int:
        """What is subtracted from values, so that they fit into a signed type."""
        return 1 << (self.bits - 1) if self.bits in (4, 8) else 0

    @property
    def names(self) -> list[str]:
        """The layers of the model, as files for transformers call them."""
        if not self.experts:
            return [self.name]
        stem, leaf = split_name(self.name)
        holder, _ = split_name(stem)
        leaf = _OF_MIXTRAL.get(leaf, leaf) if split_name(holder)[1] == "block_sparse_moe" else leaf
        return [f"{holder}.{_STACKED[1]}.{expert}.{leaf}" for expert in range(self.experts)]


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint whose ``quantization_config`` this is, unless its config has MLX's own.

    Raises ``CheckpointError``, naming the layer, for anything that doesn't fit, and for models that MLX changes.
    """
    config = read_json(config_path)
    kind = config.get("model_type")
    if kind is not None and kind not in MODELS:
        raise unsupported(
            f"{config_path}: model_type is {kind!r}, whose weights MLX may store in another form; qgemm reads MLX's "
            f"{', '.join(MODELS)}"
        )
    own = settings_of_mlx(config)
    contents = _read(quantization if own is None else own, stored, config_path, "biases")
    if config.get("quantize_activations"):
        contents.note("activations stay in float, where the checkpoint asks for those of nvfp4 and mxfp8")
    return contents


def read_metal(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """Reads the contents of a checkpoint of transformers' ``MetalConfig``. Raises as ``read`` does."""
    said: dict[str, Any] = {key: quantization[key] for key in ("bits", "group_size") if key in quantization}
    return _read(said, stored, config_path, METAL_BIASES)


def _read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path, biases: str) -> Contents:
    contents = Contents.of_files(stored)
    for name, tensor in stored.items():
        layer, leaf = split_name(name)
        if leaf == "weight" and tensor.dtype == WORD:
            _note(contents, _layer(layer, biases, quantization, contents, config_path))
    return contents


def _layer(name: str, biases: str, quantization: dict[str, Any], contents: Contents, config_path: Path) -> _Layer:
    """What the config and the headers say about a layer."""
    mode, size, bits = _stated(name, biases, quantization, config_path)
    weight = contents.stored[f"{name}.weight"]
    *stack, N, words = weight.shape if len(weight.shape) in (2, 3) else (0, 0)
    K, rest = divmod(words * 32, bits)
    is_stack = split_name(split_name(name)[0])[1] in _STACKED
    if (
        rest
        or K % size
        or N < 1
        or K < 1
        or len(stack) != is_stack
        or (is_stack and not 1 <= stack[0] <= _MOST_EXPERTS)
    ):
        raise unfit(weight.path, f"{name}.weight", weight, f"[N, words of {bits} bits in groups of {size}]")
    shape = (*weight.shape[:-1], K // size)
    dtypes = BIAS_DTYPES if mode == _AFFINE else (torch.uint8,)
    for leaf in ("scales", biases) if mode == _AFFINE else ("scales",):
        check_scale(contents, f"{name}.{leaf}", dtypes, {shape})
    return _Layer(name, biases, mode, bits, size, stack[0] if stack else 0, N, K)


def _stated(name: str, biases: str, quantization: dict[str, Any], config_path: Path) -> tuple[str, int, int]:
    """The mode, group size and bits of the layer ``name`` in the config."""
    own = quantization.get(name)
    said = own if isinstance(own, dict) else quantization
    mode = said.get("mode", _AFFINE)
    if not isinstance(mode, str) or mode not in _DEFAULTS:
        raise unsupported(f"{config_path}: {name} is in mode {mode!r}; qgemm reads MLX's {', '.join(_DEFAULTS)}")
    usual = _DEFAULTS[mode]
    size, bits = (said.get(key, each) for key, each in zip(("group_size", "bits"), usual, strict=True))
    if said is quantization and not {"group_size", "bits"} & said.keys():
        library = "transformers" if biases == METAL_BIASES else "MLX"
        raise CheckpointError(
            f"{config_path} has no quantization_config of {library}, and the tensors don't tell how many bits {name} "
            f"has, and in which groups: put the quantization there that {library} wrote"
        )
    is_known = size == usual[0] and bits == usual[1] if mode != _AFFINE else type(bits) is int and bits in _BITS
    if not is_known or type(size) is not int or size < 1:
        raise unsupported(f"{config_path}: {name} has {bits!r} bits in groups of {size!r} values in mode {mode}")
    return mode, size, bits


def _note(contents: Contents, layer: _Layer) -> None:
    scheme = layer.scheme(contents.stored[f"{layer.name}.weight"].path)
    leaves = ("weight", "scales", layer.biases) if layer.mode == _AFFINE else ("weight", "scales")
    sources = [f"{layer.name}.{leaf}" for leaf in leaves]
    grid, stored = (layer.N, layer.K // layer.size), stored_weight(layer.N, layer.K, scheme.weight.format)
    scale = {"mxfp4": torch.uint8, "mxfp8": torch.uint8, "nvfp4": FP8.storage}.get(layer.mode)
    scale = scale or contents.stored[sources[1]].dtype
    made: dict[str, Made] = {}
    for name in layer.names:
        made[f"{name}.weight"] = sources[0], *stored
        made[f"{name}.weight_scale"] = sources[1], grid, scale
        if layer.mode == _AFFINE:
            made[f"{name}.weight_zero_point"] = sources[2], grid, torch.float32
        elif layer.mode == "nvfp4":
            made[f"{name}.weight_global_scale"] = sources[1], (2,), torch.float32
        contents.manifest.layers[name] = scheme
        contents.shapes[name] = layer.N, layer.K
    contents.convert_together(sources, made, partial(_parts, layer))
    if layer.experts and (bias := f"{layer.name}.bias") in contents.stored:
        dtype = check_scale(contents, bias, BIAS_DTYPES, {(layer.experts, layer.N)}).dtype
        biases = {f"{name}.bias": (bias, (layer.N,), dtype) for name in layer.names}
        contents.convert_together([bias], biases, lambda value: [row.clone() for row in value])


def _parts(layer: _Layer, words: Tensor, scales: Tensor, biases: Tensor | None = None) -> Sequence[Tensor]:
    """The parameters of each expert, or of the layer."""
    found: list[Tensor] = []
    for index in range(layer.experts or 1):
        part = (index,) if layer.experts else ()
        found.append(by_rows(partial(_values, layer), words[part].contiguous(), layer.K))
        scale = scales[part]
        found.append(scale.view(FP8.storage) if layer.mode == "nvfp4" else scale)
        if biases is not None:
            found.append(torch.add(biases[part].float(), scale.float(), alpha=layer.middle))
        elif layer.mode == "nvfp4":
            found.append(torch.ones(2, device=scale.device))
    return found


def _values(layer: _Layer, words: Tensor) -> Tensor:
    """Rows of the weight as they are stored."""
    octets = words.view(torch.uint8)
    if layer.mode == "mxfp8":
        return octets.view(FP8.storage)
    if layer.bits == 8:
        return (octets ^ 128).view(INT8.storage)
    codes = unpack_nibbles(octets) if layer.bits == 4 else _unpack(octets, layer.bits)
    if layer.bits > 4:
        return codes.view(INT8.storage)
    return pack_codes(codes ^ 8 if layer.mode == _AFFINE and layer.bits == 4 else codes)


def _unpack(octets: Tensor, bits: int) -> Tensor:
    """Fields of ``bits``, uint8 ``[n, fields]``, from bytes whose lowest bit is the first."""
    each = torch.arange(8, dtype=torch.uint8, device=octets.device)
    single = (octets[..., None] >> each & 1).view(octets.shape[0], -1, bits)
    return (single << each[:bits]).sum(-1, dtype=torch.uint8)
