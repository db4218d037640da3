"""``PositionBias``: what is added to attention's scores by how far tokens are apart, as T5 learns it.

``attend`` is for modules with code of their own for ``softmax(q @ k.T * scaling + bias + mask) @ v``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

POSITION_BIAS = "position_bias"
"""What it is called among the arguments of layers, which hand it on from one to the next."""


@dataclass(frozen=True)
class PositionBias:
    """How an attention module finds the bias of its scores if it is given none.

    ``learned``: whether it computes that, by ``compute_bias``; else it is zeros.
    """

    learned: bool

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, seen: int | Tensor) -> Tensor:
        """``[1, H, S, length]`` of queries ``[B, H, S, D]`` behind ``seen`` tokens, and keys ``[B, H, length, D]``."""
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
    """Attention ``[B, S, H, D]`` of heads ``[B, H, S, D]``, as transformers' attention functions return it.

    ``mask``, ``position_bias``: both are added to scores, of a shape that broadcasts to ``[B, H, S, length]``.
    """
    if mask is not None and position_bias is not None:
        mask = mask + position_bias
    mask = position_bias if mask is None else mask
    # One of bools would choose keys.
    added = None if mask is None else mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scaling).transpose(1, 2), None
