"""Which modules of a model are layers that can be fused, and how each computes: by its children and their names.

Names alone don't say all: whether a layer rotates its queries, or in which order branches are added. So there are
several candidates, and ``verify.py`` finds out which of them computes what the layer does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import CodeType
from typing import Any

from torch import nn

from qgemm.fusion.probe import find_activation, find_norm, find_rotation
from qgemm.fusion.verify import Call, computes_attention
from qgemm.nn.blocks.attention import FusedAttention, HeadNorms, Rotation
from qgemm.nn.blocks.layer import Branch, CalledBranch, Form, FusedLayer
from qgemm.nn.blocks.merged import MergedWeights, why_apart
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.steps import NormStep

_ATTENTION = ("self_attn", "attention", "attn")
_MLP = ("mlp", "block_sparse_moe", "feed_forward")


@dataclass(frozen=True)
class _Norms:
    """What the norms of a layer are called; and how the layer's parts follow one another."""

    attention: str = ""
    attention_out: str = ""
    mlp: str = ""
    mlp_out: str = ""
    form: Form = "in a row"

    @property
    def names(self) -> set[str]:
        return {self.attention, self.attention_out, self.mlp, self.mlp_out} - {""}


_NORMS = (
    _Norms("input_layernorm", "", "post_attention_layernorm"),
    _Norms("input_layernorm", "", "post_attention_layernorm", form="side by side"),
    _Norms("input_layernorm", form="side by side"),
    _Norms("ln_1", "", "ln_2"),
    _Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    _Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    _Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
)
# Queries, keys and values; one layer that has them all.
_QUERY_KEY_VALUE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("qkv_proj",), ("c_attn",))
_OUT = ("o_proj", "dense", "out_proj", "c_proj")
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
# The layers of an MLP before its activation, the one after, and whether it is gated.
_MLP_LAYERS = (
    (("gate_proj", "up_proj"), "down_proj", True),
    (("gate_up_proj",), "down_proj", True),
    (("wi_0", "wi_1"), "wo", True),
    (("up_proj",), "down_proj", False),
    (("fc1",), "fc2", False),
    (("c_fc",), "c_proj", False),
    (("dense_h_to_4h",), "dense_4h_to_h", False),
    (("wi",), "wo", False),
)
_ACTIVATION = ("act_fn", "activation_fn", "act")
_ROTATE = "apply_rotary_pos_emb"
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size")


@dataclass(frozen=True)
class Candidates:
    """Ways in which a layer may compute. ``fused``: each, and none if it can't be fused; ``reason``: why a part isn't.

    ``parts``: what is fused, for the report.
    """

    fused: tuple[FusedLayer, ...]
    parts: tuple[str, ...]
    reason: str


def is_layer(module: nn.Module) -> bool:
    """Whether ``module`` looks like a layer of a transformer: attention, an MLP, and norms."""
    children = module._modules
    return (
        _child(module, _ATTENTION) != ""
        and any(_is_norm(child) for child in children.values())
        and (_child(module, _MLP) != "")
    )


def find_candidates(layer: nn.Module, call: Call) -> Candidates:
    """How ``layer`` may compute, going by a ``call`` of it. Places the weights of what is fused."""
    attention_name, mlp_name = _child(layer, _ATTENTION), _child(layer, _MLP)
    norms = {name for name, child in layer._modules.items() if _is_norm(child)}
    others = {name for name, child in layer._modules.items() if not isinstance(child, nn.Dropout | nn.Identity)}
    if unknown := sorted(others - norms - {attention_name, mlp_name}):
        return Candidates((), (), f"it has a {unknown[0]}, which is unknown")
    orders = [each for each in _NORMS if each.names == norms]
    if not orders:
        return Candidates((), (), f"norms called {', '.join(sorted(norms))} are unknown")
    attention, mlp = layer.get_submodule(attention_name), layer.get_submodule(mlp_name)
    parameters = dict(list(inspect.signature(type(layer).forward).parameters.items())[2:])
    defaults = {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    reasons, parts = [], []
    attentions: Sequence[Branch]
    mlps: Sequence[Branch]
    try:
        attentions = [_attention(attention, defaults, call)]
        parts.append("attention")
    except _NotFused as error:
        attentions = [CalledBranch(attention, True)]
        reasons.append(f"{attention_name}: {error}")
    try:
        mlps = [_mlp(mlp)]
        parts.append("mlp")
    except _NotFused as error:
        mlps = [CalledBranch(mlp, False)]
        reasons.append(f"{mlp_name}: {error}")
    reason = "; ".join(reasons)
    if not parts:
        return Candidates((), (), reason)
    passed_over = [
        (holder, name, child)
        for holder, is_fused in ((attention, "attention" in parts), (mlp, "mlp" in parts))
        if is_fused
        for name, child in holder._modules.items()
        if child is not None and not isinstance(child, nn.Dropout | nn.Identity)
    ]
    passed_over += [(layer, attention_name, attention)] if "attention" in parts else []
    passed_over += [(layer, mlp_name, mlp)] if "mlp" in parts else []
    steps = {name: NormStep(layer.get_submodule(name), find_norm(layer.get_submodule(name))) for name in norms}
    # Of a known norm, the module isn't called.
    passed_over += [(layer, name, step.module) for name, step in steps.items() if step.norm is not None]
    found = [
        FusedLayer(
            order.form,
            attention_branch,
            mlp_branch,
            attention_norm=steps.get(order.attention),
            attention_out_norm=steps.get(order.attention_out),
            mlp_norm=steps.get(order.mlp),
            mlp_out_norm=steps.get(order.mlp_out),
            multiplier=getattr(layer, "residual_multiplier", 1.0),
            residual_first=residual_first,
            defaults=defaults,
            passed_over=tuple(passed_over),
        )
        for order, attention_branch, mlp_branch in product(orders, attentions, mlps)
        if len(orders) == 1 or (order.form == "side by side") == getattr(layer, "use_parallel_residual", False)
        for residual_first in ((True, False) if order.form == "side by side" else (True,))
    ]
    return Candidates(tuple(found), tuple(parts), reason)


class _NotFused(Exception):
    """Why a branch isn't fused."""


def _attention(attention: Any, defaults: dict[str, Any], call: Call) -> FusedAttention:
    names = next((names for names in _QUERY_KEY_VALUE if all(name in attention._modules for name in names)), None)
    out = _child(attention, _OUT)
    if names is None or not out:
        raise _NotFused(f"the projections of {type(attention).__name__} are unknown")
    module = sys.modules[type(attention).__module__]
    functions, eager = (getattr(module, name, None) for name in ("ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"))
    scaling = getattr(attention, "scaling", None)
    head_dim = next((getattr(attention, name) for name in _HEAD_DIM if hasattr(attention, name)), None)
    if functions is None or eager is None or not isinstance(scaling, float) or head_dim is None:
        raise _NotFused(f"{type(attention).__name__} doesn't call an attention function of transformers")
    cache_name = next((name for name in ("past_key_values", "layer_past") if name in defaults), "past_key_values")
    told, constants = {}, _constants_of(attention)
    if "sliding_window" in constants:
        told["sliding_window"] = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    if "softcap" in constants:
        told["softcap"] = attention.attn_logit_softcapping
    qkv = _merge([attention._modules[name] for name in names])
    if len(names) == 1:
        heads = attention.config.num_attention_heads
        kv_heads = getattr(attention.config, "num_key_value_heads", None) or heads
    else:
        heads, kv_heads = (layer.out_features // head_dim for layer in qkv.layers[:2])
    called = {name for name in _code_of(attention).co_names if "rotary" in name and name.startswith("apply")}
    if called - {_ROTATE}:
        raise _NotFused(f"{type(attention).__name__} rotates by {min(called - {_ROTATE})}, which is unknown")
    rotate = getattr(module, _ROTATE) if called else None
    fused = FusedAttention(
        attention,
        qkv,
        _merge([attention._modules[out]]),
        heads,
        kv_heads,
        head_dim,
        _head_norms(attention, head_dim),
        rotate,
        columns := getattr(attention, "rotary_ndims", None),
        _rotation(rotate, columns, call),
        functions,
        eager,
        scaling,
        told,
        sinks="s_aux" in constants,
        cache_name=cache_name,
    )
    for candidate in (fused, replace(fused, rotate=None, rotation=None)):
        if computes_attention(candidate, call, defaults):
            return candidate
    for products in fused.products:
        products.separate()
    raise _NotFused(f"{type(attention).__name__} computes something else than its names say")


def _rotation(rotate: Any, columns: int | None, call: Call) -> Rotation | None:
    positions = call.others.get("position_embeddings")
    if rotate is None or not isinstance(positions, tuple) or len(positions) != 2:
        return None
    return find_rotation(rotate, *positions, columns, call.x.dtype)


def _head_norms(attention: nn.Module, head_dim: int) -> HeadNorms | None:
    for names in _HEAD_NORMS:
        query, key = (attention._modules.get(name) for name in names)
        if query is None or key is None or isinstance(query, nn.Identity):
            continue
        weight = query._parameters.get("weight")
        if weight is None:
            return HeadNorms(query, key, None, "transposed")
        is_whole = weight.dim() == 1 and weight.shape[0] > head_dim
        norms = [find_norm(module) for module in (query, key)]
        norm = norms[0] if norms[0] == norms[1] else None
        return HeadNorms(query, key, norm, "columns" if is_whole else "heads")
    return None


def _mlp(mlp: nn.Module) -> FusedMlp:
    found = next((each for each in _MLP_LAYERS if {*each[0], each[1]} <= set(mlp._modules)), None)
    if found is None:
        raise _NotFused(f"{type(mlp).__name__} is called as it is")
    names, last, gated = found
    activation = next((getattr(mlp, name) for name in _ACTIVATION if hasattr(mlp, name)), None)
    if activation is None:
        raise _NotFused(f"the activation of {type(mlp).__name__} is unknown")
    layers = [mlp.get_submodule(name) for name in (*names, last)]
    return FusedMlp(_merge(layers[:-1]), _merge(layers[-1:]), activation, find_activation(activation), gated)


def _merge(layers: Sequence[Any]) -> MergedWeights:
    if reason := why_apart(layers):
        raise _NotFused(reason)
    return layers[0].merged if _are_merged(layers) else MergedWeights(layers)


def _are_merged(layers: Sequence[Any]) -> bool:
    merged = layers[0].merged
    return isinstance(merged, MergedWeights) and merged.layers == tuple(layers)


def _child(module: nn.Module, names: Sequence[str]) -> str:
    return next((name for name in names if module._modules.get(name) is not None), "")


def _is_norm(module: nn.Module | None) -> bool:
    return module is not None and "norm" in type(module).__name__.lower()


def _code_of(module: nn.Module) -> CodeType:
    code: CodeType = inspect.unwrap(type(module).forward).__code__
    return code


def _constants_of(module: nn.Module) -> set[str]:
    """The names of what is passed in calls that the module's ``forward`` makes, among others."""
    found: set[str] = set()
    for constant in _code_of(module).co_consts:
        found.update(constant if isinstance(constant, tuple) else (constant,))
    return found
