"""GGUF files for tests, as the package gguf writes them: blocks with random values, and whole tiny models."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

Array = np.ndarray[Any, Any]
# Where the float16 numbers of a block begin.
HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": ()},
}
SETTINGS = {
    **{"context_length": 64, "block_count": 2, "embedding_length": 256, "feed_forward_length": 512},
    **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5},
    **{"rope.freq_base": 10000.0, "rope.dimension_count": 64, "vocab_size": 97},
}
"""Those of a tiny llama."""


def random_blocks(kind: str, *shape: int, seed: int = 0, std: float = 0.02) -> Array:
    """Bytes of a tensor of ``shape``, of values around ``std``: random, but for the factors of blocks."""
    rng = np.random.default_rng(seed)
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, nbytes), dtype=np.uint8)
    # The whole numbers that the factors multiply, roughly.
    size = {"Q2_K": 16, "Q3_K": 40, "Q4_K": 256, "Q5_K": 512, "Q6_K": 1000, "IQ4_NL": 60, "IQ4_XS": 800, "Q8_0": 70}
    for start in HALVES[kind]:
        factor = rng.uniform(0.5, 2, blocks.shape[:-1]) * rng.choice((-1, 1), blocks.shape[:-1])
        halves = (std / size.get(kind, 8) * factor).astype("<f2")
        blocks[..., start : start + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = 119 + blocks[..., 0] % 4
    return blocks.reshape(*shape[:-1], -1)
