"""Gives a trained model outlier channels, as large models have them, without changing what it computes.

Small models have none, so methods made for outliers can't be told apart on them. What large ones were measured to have:

- Dettmers et al. 2022, "LLM.int8()", https://arxiv.org/abs/2208.07339: from 6.7 billion parameters on, the inputs of
  all attention and feed-forward projections have the same few outlier features (six there), up to 20 times as large as
  the others. From here: six channels, the same in every block, in the outputs of both of its norms.
- Xiao et al. 2022, "SmoothQuant", https://arxiv.org/abs/2211.10438: outliers are about 100 times as large as most
  values, and stay in fixed channels for all tokens. From here: factors of up to 64, fixed channels.
- Sun et al. 2024, "Massive Activations in Large Language Models", https://arxiv.org/abs/2402.17762, and Yang et al.
  2024, "Mitigating Quantization Errors Due to Activation Spikes in GLU-Based LLMs", https://arxiv.org/abs/2405.14428: a
  few activations of a few tokens are far larger still, and arise in gated feed-forward layers, at the input of
  ``down_proj``. From here: outlier channels there too. That they are confined to few tokens isn't imitated.

A norm's gain times ``f`` and the columns of the next weights divided by ``f`` leave the product as it was. So do rows
of ``up_proj`` times ``f`` and columns of ``down_proj`` divided by ``f``: the gate multiplies what ``up_proj`` gives.
Factors are powers of two, which change exponents alone: every product has the same bits as before.

What this can't imitate: in a model that was trained with outliers the weights that read them need not be small. Here
they are, so a method that moves scales from activations to weights can undo all of it, which is more than it can
do for a real model; and methods for weights alone meet small columns that matter as much as others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

NORM_FACTORS = (16.0, 16.0, 32.0, 32.0, 64.0, 64.0)
"""Of the outlier channels of norms: between the 20 of LLM.int8() and the 100 of SmoothQuant."""
DOWN_FACTORS = (32.0, 64.0)
"""Of the outlier channels at the input of ``down_proj``, other ones in every block."""


@torch.no_grad()
def add_outliers(model: nn.Module) -> nn.Module:
    """Makes some channels of a Llama-like model's activations larger, in place; returns the model."""
    body: Any = model.get_submodule("model")
    generator = torch.Generator().manual_seed(0)
    shared = torch.randperm(body.embed_tokens.weight.shape[1], generator=generator)[: len(NORM_FACTORS)]
    for block in body.layers:
        attention, mlp = block.self_attn, block.mlp
        for norm, readers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            _scale(norm.weight, readers, shared, NORM_FACTORS)
        own = torch.randperm(mlp.down_proj.weight.shape[1], generator=generator)[: len(DOWN_FACTORS)]
        _scale(mlp.up_proj.weight, (mlp.down_proj,), own, DOWN_FACTORS)
    return model


def _scale(source: Any, readers: Sequence[nn.Linear], channels: torch.Tensor, factors: Sequence[float]) -> None:
    """Multiplies entries or rows of ``source``, and divides the columns of those that read its output."""
    by = torch.tensor(factors, dtype=torch.float32)
    index = channels.to(source.device)
    source[index] *= by.to(source).view(-1, *[1] * (source.ndim - 1))
    for reader in readers:
        reader.weight[:, index] /= by.to(reader.weight)
