"""``FusedCrossAttention``: attention of a decoder to its encoder's output, with keys and values in one product.

Keys and values are computed once for all tokens, and are read from the cache afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.operands import Input, Operands
from qgemm.nn.blocks.position_bias import POSITION_BIAS, PositionBias

STATES, KEY_VALUE_STATES = "encoder_hidden_states", "key_value_states"
"""The names of the encoder's output among a layer's arguments: in a layer, and in attention or a layer of it alone."""


@dataclass(frozen=True, eq=False)
class FusedCrossAttention:
    """How a cross-attention module computes.

    - ``module``: the module; ``query``, ``key_value``, ``out``: its projections.
    - ``head_dim``, ``functions``, ``eager``, ``scaling``, ``query_scaling``: as in ``FusedAttention``.
    - ``names``: what the layer's arguments are called in a call of the module; None for those that it doesn't get.
      ``states_name``, ``mask_name``: the names of the encoder's output and of the mask there.
    - ``position_bias``, ``told``: as in ``FusedAttention``.
    """

    module: Any
    query: MergedWeights
    key_value: MergedWeights
    out: MergedWeights
    head_dim: int
    functions: Any
    eager: Callable[..., Any]
    scaling: float
    query_scaling: float
    names: Mapping[str, str | None]
    cache_name: str
    states_name: str = KEY_VALUE_STATES
    mask_name: str = "attention_mask"
    position_bias: PositionBias | None = None
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of its products."""
        return (self.query, self.key_value, self.out)

    def __call__(
        self,
        x: Input,
        operands: tuple[Operands, ...],
        residual: Tensor | None,
        dtype: torch.dtype,
        context: MutableMapping[str, Any],
    ) -> Tensor:
        """The output of the module for ``x [B, S, K]``, plus ``residual``, in ``dtype``; see ``FusedAttention``."""
        into, of_states, out_of = operands
        others: dict[Any, Any] = {self.names.get(name, name): value for name, value in context.items()}
        others.pop(None, None)
        states, mask = others.pop(self.states_name), others.pop(self.mask_name, None)
        cache = others.pop(self.cache_name, None)
        q = into.product(x, dtype)
        shape = q.shape[:-1]
        q = self._by_head(q if self.query_scaling == 1.0 else q * self.query_scaling)
        layer = self.module.layer_idx
        if cache is not None and cache.is_updated.get(layer):
            kept = cache.cross_attention_cache.layers[layer]
            k, v = kept.keys, kept.values
        else:
            k, v = map(self._by_head, of_states.product(states, dtype).chunk(2, dim=-1))
            if cache is not None:
                k, v = cache.cross_attention_cache.update(k, v, layer)
                cache.is_updated[layer] = True
        if self.position_bias is not None and others.get(POSITION_BIAS) is None:
            others[POSITION_BIAS] = context[POSITION_BIAS] = self.position_bias(self.module, q, k, 0)
        others.update(self.told)
        attend = self.functions.get_interface(self.module.config._attn_implementation, self.eager)
        out, _ = attend(self.module, q, k, v, mask, dropout=0.0, scaling=self.scaling, **others)
        return out_of.product(out.reshape(*shape, -1), dtype, residual)

    def _by_head(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)
