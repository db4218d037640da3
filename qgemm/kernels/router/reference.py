"""The product of a router in plain PyTorch: the specification, and what runs on a CPU and for many tokens."""

import torch
from torch import Tensor
from torch.nn import functional as F


def router_logits_reference(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``dispatch.router_logits``, of operands in ``dtype``."""
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
