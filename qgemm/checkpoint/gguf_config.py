"""The config of a transformers model from the settings of a GGUF file, as transformers itself derives it.

What transformers passes over, and the model depends on, is added here, or refused: some sizes, and how rotary positions
are scaled for long contexts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError, unsupported

ROTARY_FACTORS = "rope_freqs.weight"
"""The tensor by whose values rotary frequencies are divided, in files of Llama 3.1 and later."""

# What Llama 3.1 to 3.3 say about long contexts, but for the factor, which is 8 or 32.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_FACTORS = (8.0, 32.0)
_SCALINGS = ("linear", "yarn")
# By architecture: settings that transformers doesn't read, and what its configs call them.
_SIZES = {
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
}


def model_config(path: Path, settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config, as in a ``config.json``, of the model in the file at ``path``, whose ``settings`` these are.

    Raises ``CheckpointError`` for an architecture that transformers doesn't read from GGUF, and for settings that
    aren't valid; ``ImportError`` without transformers or the package gguf.
    """
    architecture = settings.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path} doesn't say of which architecture its model is")
    try:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from transformers.utils.import_utils import is_gguf_available
    except ImportError as error:
        raise ImportError(f'{path} is read with transformers: pip install "transformers>=5.17" "gguf>=0.10"') from error
    if not is_gguf_available():
        raise ImportError(f'{path} is read with the package gguf: pip install "gguf>=0.10"')
    try:
        config: dict[str, Any] = load_gguf_checkpoint(str(path))["config"]
    except Exception as error:  # transformers' code may raise anything for unexpected settings
        raise unsupported(f"{path}: transformers can't read the settings of its model: {error}") from error
    kind = config.get("model_type")
    if "architectures" not in config and isinstance(kind, str) and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    for setting, name in _SIZES.get(architecture, {}).items():
        if f"{architecture}.{setting}" in settings:
            config.setdefault(name, settings[f"{architecture}.{setting}"])
    config["dtype"] = dtype
    scaling = _scaling(path, settings, architecture)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _scaling(path: Path, settings: dict[str, Any], architecture: str) -> dict[str, Any] | None:
    """How settings say that positions are scaled."""
    said = settings.get(f"{architecture}.rope.scaling.type", "none")
    factor = settings.get(f"{architecture}.rope.scaling.factor")
    if said == "none" or (said == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if said not in _SCALINGS or not isinstance(factor, float) or not math.isfinite(factor) or factor < 1:
        raise unsupported(f"{path}: positions are scaled as {said!r} by {factor}, which qgemm doesn't read from GGUF")
    scaling: dict[str, Any] = {"rope_type": said, "factor": factor}
    length = settings.get(f"{architecture}.rope.scaling.original_context_length")
    if said == "yarn" and isinstance(length, int):
        scaling["original_max_position_embeddings"] = length
    return scaling


def llama3_scaling(path: Path, factors: Tensor, config: dict[str, Any]) -> dict[str, Any]:
    """The scaling of Llama 3 whose factors of rotary frequencies are these; raises ``CheckpointError`` for others."""
    base = float(config.get("rope_theta") or 10000.0)
    steps = torch.arange(len(factors), dtype=torch.float64, device="cpu") / max(len(factors), 1)
    wavelengths = 2 * math.pi * base**steps
    low, high, length = _LLAMA3.values()
    for factor in _LLAMA3_FACTORS:
        smooth = ((length / wavelengths - low) / (high - low)).clamp(0, 1)
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if torch.allclose(factors.double().cpu(), wanted, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise unsupported(f"{path}: {ROTARY_FACTORS} holds factors that aren't those of Llama 3")
