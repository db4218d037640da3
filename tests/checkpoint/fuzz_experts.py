"""Good checkpoints of other libraries with experts for the fuzzer: fused ones, and a layer for each in many formats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from families.example import language_model
from torch import Tensor

from checkpoint.fused_experts import BLOCKS, FBGEMM, GPT_OSS, in_blocks, in_turn, transposed, write_experts
from checkpoint.fuzz_foreign import from_compressed_tensors, good_foreign, mixture_from_compressed_tensors
from checkpoint.fuzz_models import Good
from qgemm import quantize_model
from qgemm.checkpoint import save_quantized
from qgemm.numerics.packing import pack_codes

Tensors = dict[str, Tensor]
WIDTH = 32
# Of a layer each: packed, with zero points, with exponents, in floats, with a global scale, a byte a value.
SCHEMES = ("int4-16", "int4-16-asymmetric", "mxfp4", "fp8", "nvfp4", "int8-weight")

_SIZES = {
    "vocab_size": 8,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN = language_model(
    "Qwen3MoeForCausalLM", **_SIZES, num_hidden_layers=len(SCHEMES), num_experts=2, moe_intermediate_size=WIDTH
)
_DEEPSEEK = language_model(
    "Qwen3MoeForCausalLM", **_SIZES, num_hidden_layers=1, num_experts=3, moe_intermediate_size=WIDTH
)
_LLAMA4 = language_model(
    "Llama4ForCausalLM",
    **{**_SIZES, "num_experts_per_tok": 1},
    num_hidden_layers=1,
    intermediate_size_mlp=WIDTH,
    num_local_experts=2,
    interleave_moe_layer_step=1,
)
_GPT_OSS = language_model("GptOssForCausalLM", **_SIZES, num_hidden_layers=1, num_local_experts=3)


def make_mixtures(folder: Path) -> list[Good]:
    """Of GPT-OSS, DeepSeek, FBGEMM and compressed-tensors; written into ``folder``."""
    layers: dict[str, Any] = {f"*.{number}.mlp.experts": scheme for number, scheme in enumerate(SCHEMES)}
    model = quantize_model(_QWEN().model, {**layers, "*": "int8"})
    save_quantized(model, folder / "experts", format="compressed-tensors", max_shard_size="100KB")
    made = [good_foreign(folder / "experts", None, mixture_from_compressed_tensors)]
    fused: list[tuple[str, Any, dict[str, Any], Any, Callable[[Tensors], Tensors]]] = [
        ("fp8-block", _DEEPSEEK, BLOCKS, in_blocks, _from_blocks),
        ("fp8", _LLAMA4, FBGEMM, transposed, _from_transposed),
        ("mxfp4", _GPT_OSS, GPT_OSS, partial(in_turn, K=WIDTH), _from_turns),
    ]
    for scheme, build, quantization, edit, meaning in fused:
        include = {"*.experts": scheme} if scheme == "mxfp4" else scheme
        write_experts(quantize_model(build().model, include), folder / f"experts-{scheme}", quantization, edit)
        made.append(good_foreign(folder / f"experts-{scheme}", None, meaning))
    return made


def _from_blocks(files: Tensors) -> Tensors:
    return {name.removesuffix("_inv"): tensor for name, tensor in from_compressed_tensors(files).items()}


def _from_transposed(files: Tensors) -> Tensors:
    found = from_compressed_tensors(files)
    for name, tensor in found.items():
        if tensor.ndim == 3:
            # Scales have their only column first, or last.
            is_scale = name.endswith("_scale")
            found[name] = tensor.flatten(1)[:, :, None] if is_scale else tensor.transpose(1, 2).contiguous()
    return found


def _from_turns(files: Tensors) -> Tensors:
    found = {}
    for name, tensor in files.items():
        if name.endswith("_blocks"):
            # Two codes in a byte, the first in its low bits.
            codes = torch.stack((tensor & 15, tensor >> 4), dim=-1).flatten(2)
            tensor = torch.stack([pack_codes(expert) for expert in codes])
        own = name.removesuffix("_blocks")
        own = own.removesuffix("s") if name.endswith("_scales") else own
        gates_first = "experts.gate_up_proj" in name
        found[own] = torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1) if gates_first else tensor
    return found
