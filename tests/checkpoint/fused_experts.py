"""Folders of other libraries whose experts are fused: tensors of a quantized model, as these have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from qgemm.numerics.packing import unpack_codes

Tensors = dict[str, Tensor]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FBGEMM = {"quant_method": "fbgemm_fp8"}
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def write_experts(
    model: Any, folder: Path, quantization: dict[str, Any], edit: Callable[[str, Tensor], Tensors]
) -> None:
    """A float checkpoint's config, and the tensors of a quantized ``model`` as ``edit`` makes them of one."""
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        tensors.update(edit(name, tensor.detach()))
    folder.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string(use_diff=False))
    config |= {"architectures": [type(model).__name__], "dtype": "float32", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def in_blocks(name: str, tensor: Tensor) -> Tensors:
    """As DeepSeek has fp8."""
    return {f"{name}_inv" if name.endswith("_scale") else name: tensor}


def transposed(name: str, tensor: Tensor) -> Tensors:
    """As FBGEMM has the experts of Llama 4."""
    if ".experts." not in name:
        return {name: tensor[:, None] if name.endswith("weight_scale") else tensor}
    if name.endswith("_scale"):
        return {name: tensor[:, None] if "gate_up" in name else tensor[:, :, None]}
    return {name: tensor.transpose(1, 2)}


def in_turn(name: str, tensor: Tensor, K: int) -> Tensors:
    """As GPT-OSS has mxfp4, with ``K`` columns everywhere: gates and ups in turn, two codes side by side in a byte."""
    if ".experts." not in name:
        return {name: tensor}
    rows = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2) if "gate_up_proj" in name else tensor
    if name.endswith("_bias"):
        return {name: rows}
    if name.endswith("_scale"):
        return {f"{name}s": rows}
    codes = torch.stack([unpack_codes(expert, K) for expert in rows])
    return {f"{name}_blocks": (codes[..., ::2] | codes[..., 1::2] << 4).unflatten(-1, (K // 32, 16))}
