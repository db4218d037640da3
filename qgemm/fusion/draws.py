"""Random values to probe and to verify with: float32 on the CPU, whatever PyTorch's defaults are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Of the standard normal distribution."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Between 0 and 1."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
