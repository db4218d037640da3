"""The models: configs of transformers, from which models with random weights are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

_LLAMA = {"rope_theta": 500000.0, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "vocab_size": 128256}


@dataclass(frozen=True)
class ModelShape:
    """A model's config.

    - ``config_class``: of transformers, called with ``config`` and ``num_hidden_layers``.
    - ``min_cosine``: of the outputs of a right quantized model to the float model's. Random weights don't damp what
      rounding does to the layers before: after 32 layers of Llama 3 8B it is 0.94 in int8, and a wrong layer gives
      nearly 0.
    """

    name: str
    config_class: str
    layers: int
    config: Mapping[str, Any] = field(default_factory=dict)
    is_decoder: bool = True
    min_cosine: float = 0.9

    def resized(self, name: str, layers: int, **config: Any) -> ModelShape:
        """The same architecture in other sizes."""
        return replace(self, name=name, layers=layers, config={**self.config, **config})

    def make_config(self, layers: int | None = None) -> Any:
        """The config, with another number of ``layers`` if one is given."""
        import transformers

        config = getattr(transformers, self.config_class)(**self.config, num_hidden_layers=layers or self.layers)
        config.pad_token_id = 0
        return config

    def build(self, device: torch.device, layers: int | None = None) -> Any:
        """The model in eval mode, random but always the same: bfloat16 on a GPU, float32 on a CPU."""
        from transformers import AutoModel, AutoModelForCausalLM

        config, dtype = self.make_config(layers), torch.bfloat16 if device.type == "cuda" else torch.float32
        before = torch.get_default_dtype()
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)  # float32 weights of a large model don't fit beside it
        try:
            with device:
                kind = AutoModelForCausalLM if self.is_decoder else AutoModel
                model: nn.Module = kind.from_config(config, dtype=dtype)
        finally:
            torch.set_default_dtype(before)
        if self.is_decoder:
            model.generation_config.eos_token_id = None  # type: ignore[union-attr]
        return model.eval()

    def cache_bytes(self, batch: int, tokens: int) -> int:
        """Of keys and values in 16 bits."""
        config = self.make_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * 2 * config.num_hidden_layers * config.num_key_value_heads * size * batch * tokens)


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(
            "llama-3-8b",
            "LlamaConfig",
            32,
            {
                **_LLAMA,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
        ),
        ModelShape(
            "llama-3.2-1b",
            "LlamaConfig",
            16,
            {
                **_LLAMA,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
        ),
        ModelShape(
            "qwen3-30b-a3b",
            "Qwen3MoeConfig",
            12,  # of 48
            {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                "vocab_size": 151936,
                "max_position_embeddings": 40960,
                "rope_theta": 1000000.0,
            },
        ),
        ModelShape("bert-base", "BertConfig", 12, is_decoder=False, min_cosine=0.98),
        ModelShape(
            "minilm-l6",
            "BertConfig",
            6,
            {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12},
            is_decoder=False,
            min_cosine=0.98,
        ),
    )
}
