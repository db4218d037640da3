"""``FusedLatentAttention``: multi-head latent attention (DeepSeek V3), with queries and latents from one product.

The projections that read the input are merged: the queries or their latents, the latents of keys and values, and the
part of the keys that rotates. Whatever is computed from the cached latents is left to the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.nn.blocks.attention import PositionScale, update_cache
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.operands import Input, Operands
from qgemm.nn.blocks.steps import NormStep, read


@dataclass(frozen=True, eq=False)
class FusedLatentAttention:
    """How a module with latent attention computes.

    - ``module``: the module; ``first``: its projections that read the input; ``out``: its output projection.
    - ``query_norm``, ``query``: what computes queries from latents; None where the first product gives the queries.
    - ``rotate``: ``(q, k, *positions) -> (q, k)``, of ``[B, H, S, R]`` each, with cosines and sines or complex numbers;
      None for a module without positions, such as Kimi Linear's.
    - ``functions``, ``eager``: transformers' attention functions by name, and the module's own function.
    - ``cache_name``, ``position_scale``: as in ``FusedAttention``.
    """

    module: Any
    first: MergedWeights
    out: MergedWeights
    query_norm: NormStep | None
    query: MergedWeights | None
    rotate: Callable[..., tuple[Tensor, Tensor]] | None
    functions: Any
    eager: Callable[..., Any]
    cache_name: str
    position_scale: PositionScale | None

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of its products."""
        return (self.first, self.out) if self.query is None else (self.first, self.out, self.query)

    @property
    def called(self) -> tuple[nn.Module, ...]:
        """The modules in ``module`` that are called unchanged."""
        return self.module.kv_a_layernorm, self.module.kv_b_proj

    def __call__(
        self,
        x: Input,
        operands: tuple[Operands, ...],
        residual: Tensor | None,
        dtype: torch.dtype,
        context: Mapping[str, Any],
    ) -> Tensor:
        """The output of the module for ``x [B, S, K]``, plus ``residual``, in ``dtype``; see ``FusedAttention``."""
        others, module = dict(context), self.module
        mask, cache = others.pop("attention_mask", None), others.pop(self.cache_name, None)
        positions = others.pop("position_embeddings", None)
        rank, R, D = module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim
        into = operands[0].product(x, dtype)
        B, S, width = into.shape
        q, latent, k_rot = into.split([width - rank - R, rank, R], dim=-1)
        if self.query is not None:
            q = operands[2].product(read(q, self.query_norm, operands[2:]), dtype)
        q_pass, q_rot = q.view(B, S, -1, D + R).transpose(1, 2).split([D, R], dim=-1)
        latent = module.kv_a_layernorm(latent).view(B, 1, S, rank)
        k_rot = k_rot.view(B, 1, S, R)
        if self.rotate is not None:
            q_rot, k_rot = self.rotate(q_rot, k_rot, *(positions if isinstance(positions, tuple) else (positions,)))
        if cache is not None:
            latent, k_rot = update_cache(cache, self.cache_name, latent, k_rot, module.layer_idx, others)
        k, v = module.expand_kv(latent, k_rot)
        attend = self.functions.get_interface(module.config._attn_implementation, self.eager)
        q = torch.cat((q_pass, q_rot), dim=-1)
        if self.position_scale is not None:
            q = self.position_scale(q, others["position_ids"])
        out, _ = attend(module, q, k, v, mask, dropout=0.0, scaling=module.scaling, **others)
        return operands[1].product(out.reshape(B, S, -1), dtype, residual)
