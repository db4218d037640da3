"""Single layers as the compressed-tensors library itself writes and reads them, without a model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Tensors = dict[str, Tensor]

INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_TOKENS = {**INT8_TOKENS, "type": "float"}
FP8_GROUPS = {**FP8_TOKENS, "strategy": "group", "group_size": 128}
INT8_SHIFTED = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": False}
FP8_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def weights(bits: int, strategy: str, size: int | None = None, kind: str = "int", **others: Any) -> dict[str, Any]:
    sizes = {} if size is None else {"group_size": size}
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **sizes, **others}


def group_of(stored_as: str, weight: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"targets": ["Linear"], "format": stored_as, "weights": weight, "input_activations": inputs}


def compressed(weight: Tensor, group: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """The tensors that the library stores for a float ``weight``, with scales in ``dtype``."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from compressed_tensors.quantization.utils.helpers import maybe_pad_tensor_for_block_quant

    scheme, compressor = _scheme_and_compressor(group)
    arguments = scheme.weights
    size = arguments.group_size or weight.shape[1]
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, (rows, columns))
        tiles = padded.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns)).movedim(1, 2).flatten(-2)
    else:
        tiles = weight[None] if arguments.strategy == "tensor" else weight.unflatten(-1, (-1, size))
        tiles = tiles.flatten(-2)[:, None] if arguments.strategy == "tensor" else tiles
    state: Tensors = {"weight": weight.to(dtype)}
    more = {}
    if arguments.strategy == "tensor_group":
        state["weight_global_scale"] = more["global_scale"] = generate_gparam(weight.amin(), weight.amax())
    scale, zero_point = calculate_qparams(tiles.amin(-1), tiles.amax(-1), arguments, **more)
    state["weight_scale"] = scale.to(dtype) if scale.dtype.itemsize > 1 else scale
    if arguments.strategy == "tensor":
        state["weight_scale"] = state["weight_scale"].reshape(1)
    if not arguments.symmetric:
        state["weight_zero_point"] = zero_point
    made = compressor.compress(state, scheme)
    if scheme.input_activations is not None and scheme.input_activations.dynamic is False:
        made["input_scale"] = torch.tensor([0.03], dtype=dtype)
        if not scheme.input_activations.symmetric:
            made["input_zero_point"] = torch.tensor([-20], dtype=torch.int8)
    return {name: tensor.detach().clone().contiguous() for name, tensor in made.items()}


def decompressed(tensors: Tensors, group: dict[str, Any]) -> Tensor:
    """The float weight that the library makes of a layer's ``tensors``, in the dtype that it chooses."""
    scheme, compressor = _scheme_and_compressor(group)
    return compressor.decompress(dict(tensors), scheme)["weight"].detach()


def _scheme_and_compressor(group: dict[str, Any]) -> tuple[Any, Any]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(group)
    return scheme, BaseCompressor.get_value_from_registry(group["format"])


def write(folder: Path, layers: dict[str, Tensors], groups: dict[str, dict[str, Any]], **config: Any) -> None:
    """A checkpoint of these layers, for a model that isn't of transformers."""
    folder.mkdir(exist_ok=True)
    tensors = {f"{layer}.{leaf}": tensor.clone() for layer, own in layers.items() for leaf, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    formats = {group["format"] for group in groups.values()}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        **config,
    }
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def linears(*shapes: tuple[int, int]) -> nn.Module:
    """A model of linear layers of these shapes ``[N, K]`` side by side."""
    return nn.ModuleList(nn.Linear(K, N, bias=False) for N, K in shapes)
