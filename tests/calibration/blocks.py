"""Blocks for methods to work on, and models with outlier channels."""

from __future__ import annotations

from typing import Any

import torch
from families import FAMILIES
from torch import Tensor, nn

from qgemm.calibration.method import Block, Call, LayerWork
from qgemm.model.selection import select_layers
from qgemm.scheme import resolve_scheme


def block_of(model: nn.Module, *batches: dict[str, Tensor], scheme: str = "int8") -> Block:
    """The whole of a model as one block."""
    chosen = [layer.name for layer in select_layers(model, None) if not layer.reason and not layer.is_experts]
    layers = {name: LayerWork(name, model.get_submodule(name), resolve_scheme(scheme)) for name in chosen}
    return Block("", model, model, layers, [Call((), batch) for batch in batches])


def llama_with_outliers(factor: float) -> tuple[Any, dict[str, Tensor]]:
    """A small Llama in which two channels of every norm are large and the columns after them small, and tokens."""
    model: Any = FAMILIES["llama"]().model
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, after in (
                (layer.input_layernorm, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                (layer.post_attention_layernorm, ("mlp.gate_proj", "mlp.up_proj")),
            ):
                norm.weight[[5, 40]] *= factor
                for name in after:
                    layer.get_submodule(name).weight[:, [5, 40]] /= factor
    return model, {"input_ids": torch.randint(5, 97, (8, 24), generator=torch.Generator().manual_seed(0))}
