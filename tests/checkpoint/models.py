"""Quantized models for the tests of checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qgemm import QuantLinear


def swap_linears(model: nn.Module, scheme: str = "int8") -> nn.Module:
    """Quantizes every linear layer whose weight isn't also an embedding's."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    input_scale = 0.05 if scheme == "int8-static" else None
    for name, module in list(model.named_modules()):
        if (type(module) is nn.Linear or type(module).__name__ == "Conv1D") and id(module.weight) not in embeddings:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, QuantLinear.from_linear(module, scheme, input_scale))
    return model.eval()


def tiny_llama(tied: bool = True, layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


class Net(nn.Module):
    """Not of transformers: a buffer of each kind, a tie, a module with two names, a tensor that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.BatchNorm1d(24), nn.Linear(24, 16, bias=False))
        self.again = self.block[0]
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(-1, 1, 32)[::2])
        self.register_buffer("order", torch.arange(15, -1, -1), persistent=False)
        self.register_buffer("warp", torch.rand(16), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[:, self.order] * self.warp + self.offset
        return self.head(self.block(x) + self.again(x)[:, :16])


def quantized_net() -> Net:
    model = Net()
    model.block[0] = model.again = QuantLinear.from_linear(model.block[0])
    model.block[3] = QuantLinear.from_linear(model.block[3])
    return model.eval()
