"""A tiny Llama, or mixture of experts, in a GGUF file, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from checkpoint.gguf_files import Tensors, random_blocks, write_file

HIDDEN, LAYERS, EXPERTS = 256, 2, 3
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
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
    rng, has_experts = np.random.default_rng(0), architecture == "qwen3moe"
    settings = {
        **{"context_length": 64, "embedding_length": HIDDEN, "block_count": layers, "vocab_size": len(tokens)},
        **{"feed_forward_length": HIDDEN, "attention.head_count": 4, "attention.head_count_kv": 4},
        **{"attention.key_length": 64, "attention.value_length": 64, "expert_feed_forward_length": HIDDEN},
        **({"expert_count": EXPERTS, "expert_used_count": 2} if has_experts else {}),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(each) for each in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    tensors: Tensors = {}

    def add(name: str, *shape: int, kind: str = "") -> None:
        kind = (types or {}).get(name.rpartition(".")[2].removesuffix("_exps"), kind)
        if kind:
            tensors[f"{name}.weight"] = kind, random_blocks(kind, *shape, seed=len(tensors))
        else:
            tensors[f"{name}.weight"] = rng.standard_normal(shape, dtype=np.float32) / 16

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
    return write_file(path, architecture, settings, tensors)
