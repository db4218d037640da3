"""The arguments of the operators between a merged q|k|v product and attention, as values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

VALUES = ("plain", "normalized", "of keys")
"""The source of values: as they are; normalized without a weight; or keys before their norm, normalized likewise."""


LAYOUTS = ("in turn", "gated", "by head")
"""The heads of a merged product: all queries, then all keys, then all values; the same, and each head of queries is
followed by a gate, as in Qwen3.5; or query, key and value of a head, then those of the next, as in GPT-NeoX."""


class RotaryCall(NamedTuple):
    """Queries, keys and values of a product, and their norms and angles, in the order of the operators' arguments."""

    qkv: Tensor
    """float ``[B, S, (q_heads + 2 * kv_heads) * D]``, in the order of ``layout``.

    There are no values if they are ``"of keys"``."""
    cos: Tensor | None
    """``[1 or B, S, R / 2]``, a value for each of a head's first ``R / 2`` pairs.

    Either in the dtype of ``qkv``, with rounding to it at every step unless ``in_float``, or float32, with one
    rounding."""
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
    layout: str = "in turn"
    """One of ``LAYOUTS``."""
    scale: float = 1.0
    """Queries are multiplied by it at the end, and rounded."""
    period: float = 0.0
    """Before that, they are multiplied by ``1 + growth * log(1 + floor(position / period))``, if there are positions.

    Both the factor and the product are rounded, as in Ministral 3."""
    growth: float = 0.0
    in_float: bool = False
    """Whether the rotation is computed in float32, with one rounding, also if ``cos`` isn't float32."""
    positions: Tensor | None = None
    """int32 or int64 ``[1 or B, S]``."""

    @property
    def q_step(self) -> int:
        """How many heads of ``qkv`` lie from the start of one head of queries to the next."""
        return 1 + LAYOUTS.index(self.layout)

    @property
    def k_step(self) -> int:
        """The same of keys, and of values."""
        return 3 if self.layout == "by head" else 1

    @property
    def k_head(self) -> int:
        """The index of the first head of keys in ``qkv``."""
        return 1 if self.layout == "by head" else self.q_step * self.q_heads

    @property
    def v_head(self) -> int:
        """The index of the first head of values in ``qkv``."""
        return 2 if self.layout == "by head" else self.heads - self.kv_heads

    @property
    def heads(self) -> int:
        """The number of heads in ``qkv``."""
        queries = (2 if self.layout == "gated" else 1) * self.q_heads
        return queries + (1 if self.values == "of keys" else 2) * self.kv_heads

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
