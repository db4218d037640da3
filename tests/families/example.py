"""A model with inputs, and how such are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 97
TOKENS = 7
# Multi-head latent attention: queries, keys and values through narrow projections.
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
DEPTH = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass
class Example:
    """A model in eval mode, and keyword arguments for its forward."""

    model: nn.Module
    inputs: dict[str, Tensor]

    def output(self) -> Tensor:
        """The logits of one forward, or the last hidden state of a model without a head."""
        with torch.no_grad():
            out = self.model(**self.inputs)
        names = ("logits", "logits_per_image", "last_hidden_state")
        result: Tensor = out[next(name for name in names if name in out)]
        return result


def example(model_class: Any, config: Any, **inputs: Tensor) -> Example:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return Example(model, inputs)


def tokens(length: int = TOKENS) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) * 5 % (VOCABULARY - 5) + 5


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def language_model(name: str, **settings: Any) -> Callable[[], Example]:
    """A causal or masked language model: ``name`` is its class, ``settings`` are its config's."""

    def build() -> Example:
        cls = getattr(transformers, name)
        return example(cls, cls.config_class(**settings), input_ids=tokens())

    return build
