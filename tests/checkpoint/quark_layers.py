"""Layers as AMD's Quark writes them, and what they stand for, value by value from the description of the format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint.packers import pack
from checkpoint.samples import SAMPLES

Tensors = dict[str, Tensor]
FP4 = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "is_dynamic": False, "symmetric": None}
MXFP4 = {**FP4, "group_size": 32, "scale_format": "e8m0"}
REORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TOKENS = {"qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}


def step(dtype: str, size: int | None = None, **others: Any) -> dict[str, Any]:
    """How a tensor is quantized: with a scale for each row, or each ``size`` columns."""
    grain = {"qscheme": "per_channel", "ch_axis": 0} if size is None else {"qscheme": "per_group", "ch_axis": -1}
    symmetric = not dtype.startswith("u")
    return {"dtype": dtype, **grain, "group_size": size, "is_dynamic": False, "symmetric": symmetric, **others}


def words(fields: Tensor, in_order: bool = False) -> Tensor:
    """int32 ``[n, ceil(count / 8)]``, of whole numbers of 4 bits ``[n, count]``."""
    count = fields.shape[1]
    padded = torch.nn.functional.pad(fields & 15, (0, -count % 8)).view(len(fields), -1, 8)
    return pack((padded if in_order else padded[:, :, list(REORDER)]).flatten(1), 4)


def integers(said: dict[str, Any], N: int, K: int, in_order: bool = False, seed: int = 0) -> tuple[Tensors, Tensor]:
    """The tensors of a layer that is quantized as ``said``, and its weight, float32."""
    torch.manual_seed(seed)
    bits, unsigned = int(said["dtype"][-1]), said["dtype"].startswith("u")
    low, high = (0, 2**bits) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    groups = K // said["group_size"] if said["group_size"] else 1
    q, scale = torch.randint(low, high, (N, K)), (torch.rand(N, groups) + 0.5).bfloat16()
    z = torch.zeros(N, groups, dtype=torch.long) if said["symmetric"] else torch.randint(low, high, (N, groups))
    if said["qscheme"] == "per_tensor":
        z, scale = z[:1].expand(N, 1), scale[:1].expand(N, 1)
    weight = ((q - z.repeat_interleave(K // groups, 1)) * scale.float().repeat_interleave(K // groups, 1)).float()
    dtype = torch.uint8 if unsigned else torch.int8
    if said["group_size"]:
        values, zeros, scale = q.t(), z.t(), scale.t()
        packed = (words(values, in_order), words(zeros, in_order)) if bits == 4 else (values.to(dtype), zeros.to(dtype))
    else:
        zeros, scale = z.flatten(), scale.flatten()
        packed = (words(q, in_order), words(zeros[None], in_order)[0]) if bits == 4 else (q.to(dtype), zeros.to(dtype))
        if said["qscheme"] == "per_tensor":
            packed, scale = (packed[0], zeros[0].to(torch.int32 if bits == 4 else dtype)), scale[0]
    tensors = {"weight": packed[0], "weight_scale": scale, "weight_zero_point": packed[1]}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}, weight


def mxfp4(N: int, K: int, seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    octets, exponents = torch.randint(256, (N, K // 2)), torch.randint(120, 130, (N, K // 32))
    return {"weight": octets.to(torch.uint8), "weight_scale": exponents.to(torch.uint8)}


def fp8(N: int, K: int, seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {"weight": torch.randn(N, K).to(torch.float8_e4m3fn), "weight_scale": torch.rand(N) + 0.5}


def weight_of(own: Tensors, said: dict[str, Any], in_order: bool) -> Tensor:
    """float32 ``[N, K]``, what a layer's tensors stand for."""
    dtype, values = said["dtype"], own["weight"]
    size = said["group_size"] if said["qscheme"] == "per_group" else None
    if dtype == "fp4":
        codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(1).int()
        scale = 2.0 ** (own["weight_scale"].float() - 127)
        return E2M1[codes & 7] * (1 - 2.0 * (codes >> 3)) * scale.repeat_interleave(32, 1)
    scale = own["weight_scale"].float()
    if dtype == "fp8_e4m3":
        return values.float() * scale.reshape(-1, 1)
    is_symmetric = said.get("symmetric") is not False and not dtype.startswith("u")
    zeros = torch.zeros((), dtype=values.dtype) if is_symmetric else own["weight_zero_point"]
    if dtype.endswith("4"):
        count = scale.shape[-1] if scale.ndim else values.shape[0]
        values, zeros = (_fields(each, dtype, in_order) for each in (values, zeros))
        zeros = zeros[..., :count]
        values = values[:, :count] if size else values
    if size:
        values, scale, zeros = values.t(), scale.t(), zeros.t() if zeros.ndim == 2 else zeros
    scale, zeros = (each.reshape(-1, 1) if each.ndim < 2 else each for each in (scale, zeros))
    scale = scale.repeat_interleave(size, 1) if size else scale
    zeros = zeros.repeat_interleave(size, 1) if size and not is_symmetric else zeros
    return (values.int() - zeros.int()).float() * scale


def _fields(packed: Tensor, dtype: str, in_order: bool) -> Tensor:
    """The numbers of 4 bits in the words of a row, in their order."""
    if packed.ndim == 0:
        fields = packed.reshape(1) & 15
    else:
        fields = packed[..., None].long() >> torch.arange(0, 32, 4) & 15
        fields = (fields if in_order else fields[..., [REORDER.index(i) for i in range(8)]]).flatten(-2)
    return fields if dtype.startswith("u") else (fields ^ 8) - 8


def write_gpt_oss(folder: Path) -> Tensors:
    """Writes the sample of GPT-OSS with a layer for each expert, gates and ups in one; returns the tensors."""
    source = SAMPLES / "mxfp4-gpt-oss"
    own: Tensors = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        stem, _, leaf = key.rpartition(".")
        match = re.fullmatch("(gate_up_proj|down_proj)_(blocks|scales|bias)", leaf)
        for expert, value in enumerate(tensor) if match else ():
            part = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}[match[2]]
            own[f"{stem}.{expert}.{match[1]}.{part}"] = (value.flatten(1) if part == "weight" else value).clone()
        if not match:
            own[key] = tensor
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quark", "global_quant_config": {"weight": MXFP4}}
    (folder / "config.json").write_text(json.dumps(config))
    return own
