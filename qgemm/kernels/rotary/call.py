"""The arguments of the operators between a merged q|k|v product and attention, as values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

VALUES = ("plain", "normalized", "of keys")
"""The source of values: as they are; normalized without a weight; or keys before their norm, normalized likewise."""


class RotaryCall(NamedTuple):
    """Queries, keys and values of a product, and their norms and angles, in the order of the operators' arguments."""

    qkv: Tensor
    """float ``[B, S, (q_heads + 2 * kv_heads) * D]``, queries first, then keys, then values.

    There are no values if they are ``"of keys"``. Each head of ``gated`` queries is followed by a gate, as in
    Qwen3.5."""
    cos: Tensor | None
    """``[1 or B, S, R / 2]``, a value for each of a head's first ``R / 2`` pairs.

    Either in the dtype of ``qkv``, with rounding to it at every step, or float32, with one rounding."""
    sin: Tensor | None
    q_weight: Tensor | None
    """The weight of a norm: ``[D]``, ``[heads, D]`` or ``[heads * D]``."""
    k_weight: Tensor | None
    norm: str
    """The kind of norm, as in ``norms.Norm``."""
    eps: float
    q_heads: int
    kv_heads: int
    """0 if there are only queries."""
    interleaved: bool
    """Whether the two of a pair are adjacent, instead of R / 2 apart."""
    values: str = "plain"
    """One of ``VALUES``."""
    gated: bool = False

    @property
    def k_head(self) -> int:
        """The index of the first head of keys in ``qkv``."""
        return (2 if self.gated else 1) * self.q_heads

    @property
    def heads(self) -> int:
        """The number of heads in ``qkv``."""
        return self.k_head + (1 if self.values == "of keys" else 2) * self.kv_heads

    @property
    def head_size(self) -> int:
        """The number of values of a head."""
        return self.qkv.shape[2] // self.heads


class KeyValueStore(NamedTuple):
    """A layer's part of a cache, and its number of tokens, including those to be stored."""

    k: Tensor
    """``[B, kv_heads, L, D]``, in the dtype of the keys, or int8."""
    v: Tensor
    k_scale: Tensor | None
    """For int8: float32 ``[B, kv_heads, L]``, a scale for each token and head, as from ``quantize_rows``."""
    v_scale: Tensor | None
    length: Tensor | None
    """int32 ``[1]`` or ``[B]``, on the device; None if the tokens to be stored are the first."""
