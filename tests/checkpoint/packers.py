"""Writers of GPTQ's and AWQ's words, field by field from their descriptions, and of folders with such layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_row(fields: list[int], bits: int) -> list[int]:
    """int32 words, field i of a word in bits ``bits * i`` and up."""
    per_word = 32 // bits
    words = [0] * -(-len(fields) // per_word)
    for index, value in enumerate(fields):
        words[index // per_word] |= value << bits * (index % per_word)
    return [word - 2**32 if word >= 2**31 else word for word in words]


def pack(fields: Tensor, bits: int) -> Tensor:
    """int32 ``[n, words]`` of whole numbers ``[n, count]``, from 0 up."""
    return torch.tensor([pack_row(row, bits) for row in fields.tolist()], dtype=torch.int32)


@dataclass
class Layer:
    """A made-up layer ``[N, K]``: ``q`` and ``z`` from 0 up, ``[N, K]`` and ``[N, groups]``; ``g_idx`` ``[K]``."""

    N: int = 16
    K: int = 64
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    g_idx: Tensor | None = None
    seed: int = 0
    q: Tensor = field(init=False)
    z: Tensor = field(init=False)
    scale: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        groups = -(-self.K // self.group_size)
        self.q = torch.randint(2**self.bits, (self.N, self.K))
        self.z = torch.randint(2**self.bits, (self.N, groups))
        if self.symmetric:
            self.z[:] = 2 ** (self.bits - 1)
        # AutoRound's may be negative.
        self.scale = (torch.rand(self.N, groups) + 0.5).half() * torch.randn(self.N, groups).sign().half()

    @property
    def weight(self) -> Tensor:
        """float32 ``[N, K]``."""
        group = torch.arange(self.K) // self.group_size if self.g_idx is None else self.g_idx.long()
        return (self.q - self.z[:, group]).float() * self.scale[:, group].float()

    def gptq(self, version: int = 1) -> dict[str, Tensor]:
        """Its tensors. The whole word of version 1 is one less in each field, which may borrow from the next."""
        zeros = pack(self.z.t(), self.bits)
        if version == 1:
            ones = sum(1 << self.bits * place for place in range(32 // self.bits))
            zeros = (zeros.long() - ones).remainder(2**32)
            zeros = torch.where(zeros >= 2**31, zeros - 2**32, zeros).int()
        found = {"qweight": pack(self.q.t().t(), self.bits).t(), "qzeros": zeros, "scales": self.scale.t()}
        return found if self.g_idx is None else {**found, "g_idx": self.g_idx.int()}

    def awq(self) -> dict[str, Tensor]:
        """Its tensors."""

        def shuffled(fields: Tensor) -> Tensor:
            return fields.reshape(fields.shape[0], -1, 8)[:, :, AWQ_ORDER].flatten(1)

        return {
            "qweight": pack(shuffled(self.q.t()), 4),
            "qzeros": pack(shuffled(self.z.t()), 4),
            "scales": self.scale.t(),
        }


def write(folder: Path, layers: dict[str, dict[str, Tensor]], quantization: dict[str, Any] | None) -> Path:
    """A folder with these tensors of layers, of a model that is none of transformers'."""
    tensors = {f"{name}.{leaf}": value.contiguous() for name, of in layers.items() for leaf, value in of.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def linears(bias: bool = False, **sizes: tuple[int, int]) -> Callable[[], nn.Module]:
    """Builds a module of linear layers with these names and ``(N, K)``."""
    return lambda: nn.ModuleDict({name: nn.Linear(K, N, bias) for name, (N, K) in sizes.items()})
