"""``PositionBias``: a bias of attention's scores that depends on the distance of tokens, as T5 learns it.

``attend`` serves modules that compute ``softmax(q @ k.T * scaling + bias + mask) @ v`` in code of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

POSITION_BIAS = "position_bias"
"""The name of the bias among the arguments of layers, which pass it from one to the next."""


@dataclass(frozen=True)
class PositionBias:
    """How an attention module computes the bias of its scores if it gets none.

    ``learned``: whether ``compute_bias`` computes it; otherwise it is zeros.
    """

    learned: bool

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, seen: int | Tensor) -> Tensor:
        """``[1, H, S, length]``, for queries ``[B, H, S, D]`` after ``seen`` tokens and keys ``[B, H, length, D]``."""
        lengths = q.shape[2], k.shape[2]
        if not self.learned:
            return q.new_zeros(1, q.shape[1], *lengths)
        compute: Any = module.compute_bias
        bias: Tensor = compute(*lengths, device=q.device, past_seen_tokens=seen)
        return bias


def attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention ``[B, S, H, D]`` of heads ``[B, H, S, D]``, returned as transformers' attention functions do.

    ``mask``, ``position_bias``: both are added to the scores, and broadcast to ``[B, H, S, length]``.
    """
    if mask is not None and position_bias is not None:
        mask = mask + position_bias
    mask = position_bias if mask is None else mask
    # PyTorch would not add a bool mask, but use it to choose keys.
    added = None if mask is None else mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scaling).transpose(1, 2), None
