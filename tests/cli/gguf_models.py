"""A tiny Llama, or mixture of experts, in a GGUF file, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, LAYERS, EXPERTS = 256, 2, 3
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
# Types that gguf reads, but doesn't write: where the float16 factors of a block are.
_FACTORS = {"Q4_K": (0, 2), "Q6_K": (208,), "Q8_1": ()}
_OF_LLAMA = {"attn_q": "Q4_K", "attn_k": "Q4_0", "attn_v": "Q6_K", "attn_output": "Q8_0"}
_OF_MLP = {"ffn_gate": "Q4_0", "ffn_up": "Q4_0", "ffn_down": "Q8_0"}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    types: dict[str, str] | None = None,
    tokens: list[str] = TOKENS,
    layers: int = LAYERS,
) -> Path:
    """Writes a model of ``architecture``, ``llama`` or ``qwen3moe``; ``types``: those of matrices, by name."""
    writer, rng, has_experts = GGUFWriter(path, architecture), np.random.default_rng(0), architecture == "qwen3moe"
    for name, value in (
        *(("context_length", 64), ("embedding_length", HIDDEN), ("block_count", layers), ("vocab_size", len(tokens))),
        *(("feed_forward_length", HIDDEN), ("attention.head_count", 4), ("attention.head_count_kv", 4)),
        *(("attention.key_length", 64), ("attention.value_length", 64), ("expert_feed_forward_length", HIDDEN)),
        *((("expert_count", EXPERTS), ("expert_used_count", 2)) if has_experts else ()),
    ):
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(each) for each in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")

    def add(name: str, *shape: int, kind: str = "") -> None:
        kind = (types or {}).get(name.rpartition(".")[2].removesuffix("_exps"), kind)
        values = rng.standard_normal(shape, dtype=np.float32) / 16
        if not kind:
            writer.add_tensor(f"{name}.weight", values)
        else:
            number = GGMLQuantizationType[kind]
            blocks = _random_blocks(kind, shape, rng) if kind in _FACTORS else quantize(values, number)
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=number)

    add("token_embd", len(tokens), HIDDEN, kind="Q8_0")
    add("output", len(tokens), HIDDEN, kind="Q8_0")
    add("output_norm", HIDDEN)
    for block in (f"blk.{each}" for each in range(layers)):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"{block}.{norm}", HIDDEN)
        for name, kind in _OF_LLAMA.items():
            add(f"{block}.{name}", HIDDEN, HIDDEN, kind=kind)
        for name, kind in _OF_MLP.items():
            if has_experts:
                add(f"{block}.{name}_exps", EXPERTS, HIDDEN, HIDDEN, kind=kind)
            else:
                add(f"{block}.{name}", HIDDEN, HIDDEN, kind=kind)
        if has_experts:
            add(f"{block}.ffn_gate_inp", EXPERTS, HIDDEN)
            add(f"{block}.attn_q_norm", 64)
            add(f"{block}.attn_k_norm", 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_blocks(kind: str, shape: tuple[int, ...], rng: Any) -> Any:
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, nbytes), dtype=np.uint8)
    for start in _FACTORS[kind]:
        blocks[..., start : start + 2] = np.array([1e-4], "<f2").view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
