"""Random values for probing and verifying: float32 on the CPU, whatever PyTorch's defaults are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Values of the standard normal distribution."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Values between 0 and 1."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
