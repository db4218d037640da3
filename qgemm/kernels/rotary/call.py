"""What the operators between a merged q|k|v product and attention take, as values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

VALUES = ("plain", "normalized", "of keys")
"""Where values come from: as they are; with the norm, without a weight; or the keys, before their norm, likewise."""


class RotaryCall(NamedTuple):
    """Queries, keys and values of a product, and their norms and angles, in the order of the operators' arguments."""

    qkv: Tensor
    """float ``[B, S, (q_heads + 2 * kv_heads) * D]``, queries first, then keys, then values.

    Without the last for values that are ``"of keys"``. Each head of ``gated`` queries has a gate behind it, as in
    Qwen3.5."""
    cos: Tensor | None
    """``[1 or B, S, R / 2]``, one value for each of a head's first ``R / 2`` pairs.

    In the dtype of ``qkv``, with its roundings, or float32, with one rounding."""
    sin: Tensor | None
    q_weight: Tensor | None
    """Of a norm, ``[D]``, ``[heads, D]`` or ``[heads * D]``."""
    k_weight: Tensor | None
    norm: str
    """Its kind, of ``norms.Norm``."""
    eps: float
    q_heads: int
    kv_heads: int
    """0 for queries alone."""
    interleaved: bool
    """Whether pairs lie side by side, not R / 2 apart."""
    values: str = "plain"
    """One of ``VALUES``."""
    gated: bool = False

    @property
    def k_head(self) -> int:
        """Which head of ``qkv`` is the first of the keys."""
        return (2 if self.gated else 1) * self.q_heads

    @property
    def heads(self) -> int:
        """How many heads ``qkv`` has."""
        return self.k_head + (1 if self.values == "of keys" else 2) * self.kv_heads

    @property
    def head_size(self) -> int:
        """How many values a head has."""
        return self.qkv.shape[2] // self.heads


class KeyValueStore(NamedTuple):
    """A layer's part of a cache, and how many tokens it has, those to store among them."""

    k: Tensor
    """``[B, kv_heads, L, D]``, in the dtype of the keys, or int8."""
    v: Tensor
    k_scale: Tensor | None
    """float32 ``[B, kv_heads, L]``, for int8: one for each token and head, as ``quantize_rows`` has it."""
    v_scale: Tensor | None
    length: Tensor
    """int32 ``[1]`` or ``[B]``, on the device."""
