"""``FusedAttention``: queries, keys and values in one product, and all that follows up to the output projection.

It computes what ``forward`` of transformers' attention modules computes. These differ in a few things, which are values
here: where queries and keys are normalized, how many columns of a head rotate, and which other arguments the attention
function gets. The functions for rotation and attention are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qgemm.kernels.norms import NORMS_OF_HEADS, Norm
from qgemm.kernels.rotary.call import RotaryCall
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.operands import Input, Operands
from qgemm.nn.blocks.position_bias import POSITION_BIAS, PositionBias
from qgemm.nn.blocks.steps import NormStep, read
from qgemm.ops.rotary import rotate
from qgemm.ops.rows import gate_heads

CACHES = ("cache", "past_key_values", "layer_past")
"""What models call a cache of keys and values among their arguments: since transformers 5.24, and before.

A cache under the first name gets the attention function's arguments, and may change them.
"""

SEQUENCES = "cu_seqlens"
"""The argument with the bounds of sequences that are packed one after another."""


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """Norms of queries and keys, before or after the rotation.

    - ``query``, ``key``: the modules.
    - ``norm``: what both compute, None if that is unknown.
    - ``layout``: the shape of their input: ``"columns"`` ``[B, S, H * D]``, ``"heads"`` ``[B, S, H, D]``,
      ``"transposed"`` ``[B, H, S, D]``, or ``"rotated"``, the same after the rotation.
    """

    query: nn.Module
    key: nn.Module
    norm: Norm | None
    layout: str

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The weights of both, if operators can compute these norms of ``x``."""
        weights = [module._parameters.get("weight") for module in (self.query, self.key)]
        biases = [module._parameters.get("bias") for module in (self.query, self.key)]
        known = self.norm is not None and self.norm.kind in NORMS_OF_HEADS
        known = known and all(weight is not None and weight.dtype == x.dtype for weight in weights)
        return (weights[0], weights[1]) if known and biases == [None, None] else None  # type: ignore[return-value]

    def of_rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Both, normalized if the norms come after the rotation."""
        if self.layout != "rotated":
            return q, k
        q, k = (read(x, NormStep(module, self.norm), ()) for x, module in ((q, self.query), (k, self.key)))  # type: ignore[assignment]
        return q, k


@dataclass(frozen=True)
class Rotation:
    """How the operators should rotate queries and keys.

    - ``interleaved``: whether the two columns of a pair are adjacent.
    - ``pairs``: which columns of the model's cosines and sines have one value for each pair: the first ``"half"``,
      every ``"other"``, or ``"all"``.
    - ``in_float``: whether the model computes it in float32.
    """

    interleaved: bool
    pairs: Literal["half", "other", "all"]
    in_float: bool

    def of_pairs(self, values: Tensor) -> Tensor:
        """Cosines or sines ``[1 or B, S, columns]`` with a column for each pair."""
        if self.pairs == "half":
            values = values[..., : values.shape[-1] // 2]
        elif self.pairs == "other":
            values = values[..., ::2]
        return values


SHARED_STATES = "shared_kv_states"
"""The argument with the mapping of keys and values that layers share."""


@dataclass(frozen=True)
class Temperature:
    """A factor of queries by position: ``1 + factor * log(1 + floor((position + 1) / length))``, as in Llama 4."""

    length: float
    factor: float

    def __call__(self, q: Tensor, seen: int | Tensor) -> Tensor:
        """``q [B, H, S, D]``, which follow ``seen`` tokens, times that factor."""
        positions = (torch.arange(q.shape[2], device=q.device) + seen).float()
        factors = torch.log1p(torch.floor((positions + 1.0) / self.length)) * self.factor + 1.0
        return (q * factors[:, None]).to(q.dtype)


@dataclass(frozen=True)
class PositionScale:
    """A factor of queries by position, from the model's own ``function(positions, factor, length)`` (Ministral 3).

    ``is_known``: whether it is that of ``RotaryCall``, with ``factor`` as growth and ``length`` as period.
    """

    function: Callable[[Tensor, float, int], Tensor]
    factor: float
    length: int
    is_known: bool

    def __call__(self, q: Tensor, positions: Tensor) -> Tensor:
        """``q [B, H, S, D]`` at ``positions [1 or B, S]``, times that factor."""
        return q * self.function(positions, self.factor, self.length).to(q.dtype)


@dataclass(frozen=True)
class SharedStates:
    """Keys and values that several layers read. A layer that ``stores`` puts them there; the others read them.

    ``key``: their key in the mapping that the model hands from layer to layer.
    """

    key: str
    stores: bool


@dataclass(frozen=True, eq=False)
class FusedAttention:
    """How an attention module computes.

    - ``module``: the module; ``qkv``: its projections of queries, keys and values; ``out``: its output projection.
    - ``heads``: how many heads queries have; ``kv_heads``: how many keys and values have; ``head_dim``: of all heads.
    - ``norms``: of queries and keys, or None.
    - ``rotate``: ``(q, k, cos, sin) -> (q, k)``, of ``[B, H, S, D]`` each; None for a layer without positions.
    - ``rotated_columns``: how many columns of a head rotate, the first ones; None for all.
    - ``rotation``: the same as ``rotate``, for the operators; None where they can't compute it.
    - ``functions``, ``eager``: transformers' attention functions by name, and the module's own function; a module that
      calls none has only ``position_bias.attend``.
    - ``scaling``: the factor of the scores. ``told``: other arguments of the attention function, by name; ``sinks``:
      whether it gets ``module.sinks``.
    - ``query_scaling``: a factor of the queries, instead of the scores; 1 for none.
    - ``by_head``: whether the columns of ``qkv`` are query, key and value of one head, then those of the next.
    - ``values``: where values come from, one of ``rotary.call.VALUES``; ``value_norm``: their norm, if they have one.
    - ``gated``: whether a gate follows each head of the queries; the head's output is multiplied by its sigmoid.
    - ``gate``, ``gate_function``: a projection whose output, through that function of ``gating.dispatch.GATES``,
      multiplies heads, or None. It has a column for each of theirs, or for each head.
    - ``shared``: keys and values that other layers read too, or None. A layer that reads them has none of its own.
    - ``temperature``, ``position_scale``: a factor of queries by their position, or None.
    - ``position_bias``: what is added to the scores if the layer gets no such argument, or None.
    - ``untold``: arguments of the layer that its attention doesn't get; ``mask_name``: the layer's name for its mask.
    - ``cache_name``: the name of the argument with the cache.
    - ``packed``: whether the input is ``[S, K]``: sequences one after another, whose bounds are in ``SEQUENCES``.
    """

    module: Any
    qkv: MergedWeights
    out: MergedWeights
    heads: int
    kv_heads: int
    head_dim: int
    norms: HeadNorms | None
    rotate: Callable[..., tuple[Tensor, Tensor]] | None
    rotated_columns: int | None
    rotation: Rotation | None
    functions: Any
    eager: Callable[..., Any]
    scaling: float
    told: Mapping[str, Any]
    sinks: bool = False
    query_scaling: float = 1.0
    by_head: bool = False
    values: str = "plain"
    value_norm: nn.Module | None = None
    gated: bool = False
    gate: MergedWeights | None = None
    gate_function: str = "sigmoid"
    shared: SharedStates | None = None
    temperature: Temperature | None = None
    position_scale: PositionScale | None = None
    position_bias: PositionBias | None = None
    untold: tuple[str, ...] = ()
    mask_name: str = "attention_mask"
    cache_name: str = CACHES[0]
    packed: bool = False

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of its products."""
        return (self.qkv, self.out) if self.gate is None else (self.qkv, self.gate, self.out)

    def __call__(
        self,
        x: Input,
        operands: tuple[Operands, ...],
        residual: Tensor | None,
        dtype: torch.dtype,
        context: MutableMapping[str, Any],
    ) -> Tensor:
        """The output of the attention module for ``x [B, S, K]`` or packed ``[S, K]``, plus ``residual``, in ``dtype``.

        ``operands``: those of its products. ``context``: the module's other arguments; afterwards it also contains the
        position bias, which the next layer may get.
        """
        into, *gates, out_of = operands
        others = dict(context)
        mask, cache = others.pop("attention_mask", None), others.pop(self.cache_name, None)
        positions, states = others.pop("position_embeddings", None), others.pop(SHARED_STATES, None)
        for name in self.untold:
            others.pop(name, None)
        cache = getattr(cache, "self_attention_cache", cache)
        positions = cosines_and_sines(positions)
        seen: Any = 0
        if (self.temperature is not None or self.position_bias is not None) and cache is not None:
            seen = cache.get_seq_length(self.module.layer_idx)
            seen = seen.clone() if isinstance(seen, Tensor) else seen  # the cache updates its count in place
        qkv = into.product(x, dtype)
        shape = qkv.shape[:-1]
        if self.packed:
            qkv = qkv[None]
        shared = None if states is None else self.shared
        if shared is not None and not shared.stores:
            q = self._find_heads(qkv, positions, None, seen, others)[0]
            k, v = states[shared.key]
            k, v = k.to(q.device), v.to(q.device)
        else:
            q, k, v = self._find_heads(qkv, positions, cache, seen, others)
            if shared is not None:
                states[shared.key] = k, v
        gate = self._queries(qkv)[1] if self.gated else None
        del qkv  # a fifth of a long prompt's memory beside weights and cache; queries, keys and values are copies
        if self.position_bias is not None and others.get(POSITION_BIAS) is None:
            others[POSITION_BIAS] = context[POSITION_BIAS] = self.position_bias(self.module, q, k, seen)
        others.update(self.told)
        if self.sinks:
            others["s_aux"] = self.module.sinks
        out = self._attend(q, k, v, mask, others)
        del q, k, v
        if gate is not None:
            out = gate_heads(out, gate, "sigmoid")
        for operand in gates:
            factor = operand.product(x, dtype)
            out = gate_heads(out, factor.view(*out.shape[:-1], -1), self.gate_function)
        return out_of.product(out.reshape(*shape, -1), dtype, residual)

    def _scaled(self, q: Tensor, seen: Any, others: Mapping[str, Any]) -> Tensor:
        """``q [B, H, S, D]``, which follow ``seen`` tokens, times all factors of queries."""
        if self.temperature is not None:
            q = self.temperature(q, seen)
        if self.position_scale is not None:
            q = self.position_scale(q, others["position_ids"])
        return q if self.query_scaling == 1.0 else q * self.query_scaling

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, others: dict[str, Any]) -> Tensor:
        """The output ``[B, S, H, D]`` of the attention function, called with ``others``."""
        attend = self.eager
        if self.functions is not None:
            attend = self.functions.get_interface(self.module.config._attn_implementation, self.eager)
        parts: Any = [(q, k, v)]
        if self.packed:
            others.pop("max_seqlen", None)
            lengths = others.pop(SEQUENCES).diff().tolist()
            parts = zip(*(each.split(lengths, dim=2) for each in (q, k, v)), strict=True)
        told = {"dropout": 0.0, "scaling": self.scaling, **others}
        out = [attend(self.module, *part, mask, **told)[0] for part in parts]
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def _queries(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and their gates, ``[B, S, H, D]`` each."""
        q, gate = qkv[..., : 2 * self.heads * self.head_dim].unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        return q, gate

    def _find_heads(
        self, qkv: Tensor, positions: tuple[Tensor, Tensor] | None, cache: Any, seen: Any, others: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of this forward ``[B, H, S, D]``, and all keys and values ``[B, Hkv, length, D]``.

        ``seen``: the number of tokens in the cache. ``others``: the arguments that the attention function will get.
        """
        call = self._find_call(qkv, positions, others)
        is_split, stores = call is None or (cache is None and positions is None), False
        if call is None or is_split:
            q, k, v = self._split(qkv, positions)
        elif self.norms is not None and self.norms.layout == "rotated":
            q, k, v = rotate(call)
            q, k = self.norms.of_rotated(q.transpose(1, 2), k)
        else:
            stores = hasattr(cache, "rotate_and_store")
            q, k, v = cache.rotate_and_store(self.module.layer_idx, call) if stores else rotate(call)
            q = q.transpose(1, 2)
        if is_split or not self._scales_in_rotate:
            q = self._scaled(q, seen, others)
        if cache is None or stores:
            return q, k, v
        if is_split or not _takes_as_they_are(cache, self.module.layer_idx, k, v):
            k, v = update_cache(cache, self.cache_name, k, v, self.module.layer_idx, others)
        return q, k, v

    @property
    def _scales_in_rotate(self) -> bool:
        """Whether ``ops.rotate`` multiplies queries by all of their factors."""
        is_last = self.norms is None or self.norms.layout != "rotated"
        return is_last and self.temperature is None and (self.position_scale is None or self.position_scale.is_known)

    def _find_call(
        self, qkv: Tensor, positions: tuple[Tensor, Tensor] | None, others: Mapping[str, Any]
    ) -> RotaryCall | None:
        """The arguments of ``ops.rotate``; None if it can't compute this."""
        cos = sin = q_weight = k_weight = None
        kind, eps = "rms", 0.0
        if self.rotate is not None:
            if self.rotation is None or positions is None or positions[0].dim() != 3:
                return None
            if positions[0].shape[1] != qkv.shape[1]:  # the first tokens have no positions
                return None
            cos, sin = (self.rotation.of_pairs(values) for values in positions)
        if self.norms is not None and self.norms.layout != "rotated":
            weights = self.norms.weights(qkv)
            if weights is None or self.norms.norm is None:
                return None
            (q_weight, k_weight), kind, eps = weights, self.norms.norm.kind, self.norms.norm.eps
        interleaved = self.rotation is not None and self.rotation.interleaved
        factors: dict[str, Any] = {"in_float": self.rotation is not None and self.rotation.in_float}
        if self._scales_in_rotate:
            factors["scale"] = self.query_scaling
            if (by := self.position_scale) is not None:
                factors |= {"period": float(by.length), "growth": by.factor, "positions": others["position_ids"]}
        return RotaryCall(
            qkv, cos, sin, q_weight, k_weight, kind, eps, self.heads, self.kv_heads, interleaved, self.values,
            "by head" if self.by_head else "gated" if self.gated else "in turn", **factors,
        )  # fmt: skip

    def _split(self, qkv: Tensor, positions: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, H, S, D]``, keys and values ``[B, Hkv, S, D]``, normalized and rotated."""
        D, norms = self.head_dim, self.norms
        if self.by_head:
            q, k, v = qkv.view(*qkv.shape[:-1], -1, 3 * D).chunk(3, dim=-1)
        elif self.values == "of keys":
            q, k = qkv.split([self.heads * D, self.kv_heads * D], dim=-1)
            v = k
        elif self.gated:
            _, k, v = qkv.split([2 * self.heads * D, self.kv_heads * D, self.kv_heads * D], dim=-1)
            q = self._queries(qkv)[0].flatten(-2)
        else:
            q, k, v = qkv.split([self.heads * D, self.kv_heads * D, self.kv_heads * D], dim=-1)
        if norms is not None and norms.layout == "columns":
            q, k = norms.query(q), norms.key(k)
        if not self.by_head:
            q, k, v = (each.view(*qkv.shape[:-1], -1, D) for each in (q, k, v))
        if self.value_norm is not None:
            v = self.value_norm(v)
        if norms is not None and norms.layout == "heads":
            q, k = norms.query(q), norms.key(k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if norms is not None and norms.layout == "transposed":
            q, k = norms.query(q), norms.key(k)
        if self.rotate is not None:
            assert positions is not None
            R = self.rotated_columns
            if R is None:
                q, k = self.rotate(q, k, *positions)
            else:
                turned = self.rotate(q[..., :R], k[..., :R], *positions)
                q, k = (torch.cat((own, x[..., R:]), dim=-1) for own, x in zip(turned, (q, k), strict=True))
        if norms is not None:
            q, k = norms.of_rotated(q, k)
        return q, k, v


def cosines_and_sines(positions: Any) -> tuple[Tensor, Tensor] | None:
    """The cosines and sines in ``positions``, a model's argument of that name: ``[1 or B, S, columns]`` each."""
    if isinstance(positions, Tensor) and positions.is_complex():
        positions = positions.real, positions.imag
    if not isinstance(positions, tuple | list) or len(positions) != 2:
        return None
    cos, sin = (values[None] if values.dim() == 2 else values for values in positions)
    return cos, sin


def update_cache(
    cache: Any, name: str, k: Tensor, v: Tensor, layer_idx: int, others: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Adds ``k`` and ``v`` to ``cache``; returns all keys and values of the layer. ``name``: one of ``CACHES``.

    ``others``: the arguments that the attention function will get.
    """
    told = {"kwargs": others} if name == CACHES[0] else {}
    found: tuple[Tensor, Tensor] = cache.update(k, v, layer_idx, **told)
    return found


def _takes_as_they_are(cache: Any, layer_idx: int, k: Tensor, v: Tensor) -> bool:
    """Gives ``k`` and ``v``, which nobody else holds, to an empty layer of transformers' growing cache, if it is one.

    The cache's ``update`` would only copy them, which takes 4 % of a prompt's time.
    """
    layers = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    is_dynamic = type(layer).__name__ == "DynamicLayer" and type(layer).__module__ == "transformers.cache_utils"
    if layer is None or not is_dynamic or layer.is_initialized or cache.offloading:
        return False
    layer.lazy_initialization(k, v)
    layer.keys, layer.values = k, v
    return True
