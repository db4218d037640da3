"""Which modules of a model are layers that can be fused, and how each computes: by its children and their names.

Names alone don't say all: whether a layer rotates its queries, or in which order branches are added. So there are
several candidates, and ``verify.py`` finds out which of them computes what the layer does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from torch import nn

from qgemm.fusion.probe import CHOICE_BIAS, find_activation, find_norm, find_rotation, find_router
from qgemm.fusion.verify import MAX_ERROR, Call, computes_mixture, error_of_attention
from qgemm.nn.blocks.attention import FusedAttention, HeadNorms, Rotation
from qgemm.nn.blocks.latent_attention import FusedLatentAttention
from qgemm.nn.blocks.layer import Branch, CalledBranch, Form, FusedLayer
from qgemm.nn.blocks.merged import MergedWeights, why_apart
from qgemm.nn.blocks.mixture import FusedMixture
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.steps import NormStep
from qgemm.nn.experts import QuantExperts

_ATTENTION = ("self_attn", "attention", "attn", "self_attention")
_MLP = ("mlp", "block_sparse_moe", "feed_forward", "ffn")


_Places = tuple[tuple[nn.Module, str, nn.Module], ...]


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
    _Norms("layer_norm1", "", "layer_norm2"),
    _Norms("operator_norm", "", "ffn_norm"),
    _Norms("input_layernorm", "", "pre_ff_layernorm"),
    _Norms("self_attn_layer_norm", "", "final_layer_norm"),
    _Norms("", "self_attn_layer_norm", "", "final_layer_norm", form="norms last"),
    _Norms("", "sa_layer_norm", "", "output_layer_norm", form="norms last"),
    _Norms("", "attention.output.LayerNorm", "", "output.LayerNorm", form="norms last"),
    _Norms("ln_attn", "", "ln_mlp", form="side by side"),
)
# Queries, keys and values; one layer that has them all.
_QUERY_KEY_VALUE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("qkv_proj",),
    ("c_attn",),
    ("query_key_value",),
)
_BY_HEAD = ("query_key_value",)
_OUT = ("o_proj", "dense", "out_proj", "c_proj", "out_lin")
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
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
    (("lin1",), "lin2", False),
)
# Of a mixture, besides its experts.
_ROUTER = ("gate", "router")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_SHARED_GATE = "shared_expert_gate"
_ACTIVATION = ("act_fn", "activation_fn", "act", "activation")
_BERT = ("attention", "intermediate", "output")
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


@dataclass(frozen=True)
class _Parts:
    """The parts of a layer, by their names in it.

    ``attention``: the module that computes attention, and ``out`` the layer behind it. ``mlp``: the module, empty if
    its layers are the layer's own.
    """

    attention: str
    out: str
    mlp: str
    mlp_layers: tuple[tuple[str, ...], str, bool] | None
    activation: str
    norms: frozenset[str]


def is_layer(module: nn.Module) -> bool:
    """Whether ``module`` looks like a layer of a transformer: attention, an MLP, and norms."""
    children = module._modules
    if all(children.get(name) is not None for name in _BERT):
        return True
    has_mlp = _child(module, _MLP) != "" or {"fc1", "fc2"} <= set(children)
    return _child(module, _ATTENTION) != "" and has_mlp and any(map(_is_norm, children.values()))


def _find_parts(layer: nn.Module) -> _Parts:
    """The parts of ``layer``; raises ``NotFused`` if it has others."""
    if all(layer._modules.get(name) is not None for name in _BERT):
        return _find_parts_of_bert(layer)
    attention, mlp = _child(layer, _ATTENTION), _child(layer, _MLP)
    norms = {name for name, child in layer._modules.items() if _is_norm(child)}
    others = {name for name, child in layer._modules.items() if not isinstance(child, nn.Dropout | nn.Identity)}
    known = norms | {attention, mlp} if mlp else norms | {attention, "fc1", "fc2", *_ACTIVATION}
    if unknown := sorted(others - known):
        raise NotFused(f"it has a {unknown[0]}, which is unknown")
    holder = layer.get_submodule(mlp)
    layers = next((each for each in _MLP_LAYERS if {*each[0], each[1]} <= set(holder._modules)), None)
    activation = next((name for name in _ACTIVATION if callable(getattr(holder, name, None))), "")
    out = _child(layer.get_submodule(attention), _OUT)
    return _Parts(attention, out and f"{attention}.{out}", mlp, layers, _dotted(mlp, activation), frozenset(norms))


def _find_parts_of_bert(layer: nn.Module) -> _Parts:
    if getattr(layer, "chunk_size_feed_forward", 0) or layer._modules.get("crossattention") is not None:
        raise NotFused("it has cross attention, or an MLP in chunks")
    names = {"attention.self", "attention.output.dense", "intermediate.dense", "output.dense"}
    norms = frozenset({"attention.output.LayerNorm", "output.LayerNorm"})
    if not names | norms <= {name for name, _ in layer.named_modules()}:
        raise NotFused("its parts have unknown names")
    layers = (("intermediate.dense",), "output.dense", False)
    return _Parts("attention.self", "attention.output.dense", "", layers, "intermediate.intermediate_act_fn", norms)


def find_candidates(layer: nn.Module, call: Call) -> Candidates:
    """How ``layer`` may compute, going by a ``call`` of it. Places the weights of what is fused."""
    try:
        found = _find_parts(layer)
    except NotFused as error:
        return Candidates((), (), str(error))
    orders = [each for each in _NORMS if each.names == found.norms]
    if not orders:
        return Candidates((), (), f"norms called {', '.join(sorted(found.norms))} are unknown")
    parameters = dict(list(inspect.signature(type(layer).forward).parameters.items())[2:])
    defaults = {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    reasons, parts = [], []
    attention: Branch
    mlp: Branch
    try:
        attention = _attention(layer, found, defaults, call)
        parts.append("attention")
    except NotFused as error:
        attention = CalledBranch(layer.get_submodule(found.attention), True)
        reasons.append(f"{found.attention}: {error}")
    try:
        mlp = _mlp(layer, found) if found.mlp_layers else _mixture(layer.get_submodule(found.mlp), call)
        parts.append("mlp" if found.mlp_layers else "mixture")
    except NotFused as error:
        mlp = CalledBranch(layer.get_submodule(found.mlp), False)
        reasons.append(f"{found.mlp or 'the MLP'}: {error}")
    reason = "; ".join(reasons)
    if not parts or (isinstance(mlp, CalledBranch) and not found.mlp):
        return Candidates((), (), reason)
    steps = {name: NormStep(layer.get_submodule(name), find_norm(layer.get_submodule(name))) for name in found.norms}
    passed_over, called = _places(layer, attention, mlp, steps)
    fused = [
        FusedLayer(
            order.form,
            attention,
            mlp,
            attention_norm=steps.get(order.attention),
            attention_out_norm=steps.get(order.attention_out),
            mlp_norm=steps.get(order.mlp),
            mlp_out_norm=steps.get(order.mlp_out),
            multiplier=getattr(layer, "residual_multiplier", 1.0),
            residual_first=residual_first,
            defaults=defaults,
            passed_over=passed_over,
            called=called,
        )
        for order in orders
        if not _is_of_other_form(layer, orders, order)
        for residual_first in ((True, False) if order.form == "side by side" else (True,))
    ]
    return Candidates(tuple(fused), tuple(parts), reason)


def is_mlp(module: nn.Module) -> bool:
    """Whether ``module`` looks like an MLP: two or three linear layers and an activation, and nothing else."""
    children = {name for name, child in module._modules.items() if not isinstance(child, nn.Dropout | nn.Identity)}
    return any(children - {*_ACTIVATION} == {*first, last} for first, last, _ in _MLP_LAYERS)


def find_mlp(module: nn.Module) -> FusedLayer:
    """How an MLP by itself computes. Raises ``NotFused`` with the reason if it can't be fused."""
    children = set(module._modules)
    layers = next(each for each in _MLP_LAYERS if {*each[0], each[1]} <= children)
    activation = next((name for name in _ACTIVATION if callable(getattr(module, name, None))), "")
    mlp = _mlp(module, _Parts("", "", "", layers, activation, frozenset()))
    passed_over, called = _places(module, None, mlp, {})
    return FusedLayer("alone", None, mlp, passed_over=passed_over, called=called)


def find_norm_step(module: nn.Module) -> NormStep | None:
    """What a norm by itself computes, if that takes several kernels: PyTorch's own take one."""
    if not _is_norm(module) or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return None
    norm = find_norm(module)
    return None if norm is None or norm.is_layer else NormStep(module, norm)


def _is_of_other_form(layer: nn.Module, orders: Sequence[_Norms], order: _Norms) -> bool:
    """Whether ``layer`` says that of the forms for norms of these names it has another than ``order``."""
    if len(orders) == 1:
        return False
    if hasattr(layer, "do_layer_norm_before"):
        return (order.form == "in a row") != layer.do_layer_norm_before
    return (order.form == "side by side") != getattr(layer, "use_parallel_residual", False) and (
        any(each.form == "side by side" for each in orders)
    )


def _places(
    layer: nn.Module, attention: Branch | None, mlp: Branch, steps: Mapping[str, NormStep]
) -> tuple[_Places, _Places]:
    """The modules in ``layer`` that are passed over, and those that are called, each with its holder and name."""
    called = {branch.module for branch in (attention, mlp) if isinstance(branch, CalledBranch)}
    called |= {step.module for step in steps.values() if step.norm is None}
    if isinstance(attention, FusedLatentAttention):
        called |= set(attention.called)
    if isinstance(mlp, FusedMixture):
        called |= {each for each in mlp.called if each is not None}

    def below(holder: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
        for name, child in holder._modules.items():
            if child is not None and not isinstance(child, nn.Dropout | nn.Identity):
                yield holder, name, child
                if child not in called:
                    yield from below(child)

    places = tuple(below(layer))
    return tuple(each for each in places if each[-1] not in called), tuple(
        each for each in places if each[-1] in called
    )


class NotFused(Exception):
    """Why a branch isn't fused."""


def _attention(
    layer: nn.Module, parts: _Parts, defaults: dict[str, Any], call: Call
) -> FusedAttention | FusedLatentAttention:
    attention: Any = layer.get_submodule(parts.attention)
    if "kv_a_proj_with_mqa" in attention._modules:
        return _latent_attention(attention, layer.get_submodule(parts.out), defaults, call)
    names = next((names for names in _QUERY_KEY_VALUE if all(name in attention._modules for name in names)), None)
    if names is None or not parts.out:
        raise NotFused(f"the projections of {type(attention).__name__} are unknown")
    module = sys.modules[type(attention).__module__]
    functions, eager = (getattr(module, name, None) for name in ("ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"))
    scaling = getattr(attention, "scaling", getattr(attention, "scale", None))
    head_dim = next((getattr(attention, name) for name in _HEAD_DIM if hasattr(attention, name)), None)
    if functions is None or eager is None or not isinstance(scaling, float) or head_dim is None:
        raise NotFused(f"{type(attention).__name__} doesn't call an attention function of transformers")
    cache_name = next((name for name in ("past_key_values", "layer_past") if name in defaults), "past_key_values")
    told, constants = {}, _constants_of(attention)
    if "sliding_window" in constants:
        told["sliding_window"] = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    if "softcap" in constants:
        told["softcap"] = attention.attn_logit_softcapping
    # The attention function is told 1.0.
    scales_queries = any(type(constant) is float and constant == 1.0 for constant in constants)
    out = _merge([layer.get_submodule(parts.out)])
    qkv = _merge([attention._modules[name] for name in names])
    if len(names) == 1:
        heads = attention.config.num_attention_heads
        kv_heads = getattr(attention.config, "num_key_value_heads", None) or heads
    else:
        heads, kv_heads = (layer.out_features // head_dim for layer in qkv.layers[:2])
    called = {name for name in _code_of(attention).co_names if "rotary" in name and name.startswith("apply")}
    if called - {_ROTATE}:
        raise NotFused(f"{type(attention).__name__} rotates by {min(called - {_ROTATE})}, which is unknown")
    rotate = getattr(module, _ROTATE) if called else None
    fused = FusedAttention(
        attention,
        qkv,
        out,
        heads,
        kv_heads,
        head_dim,
        _head_norms(attention, head_dim),
        rotate,
        columns := getattr(attention, "rotary_ndims", None),
        _rotation(rotate, columns, call),
        functions,
        eager,
        1.0 if scales_queries else scaling,
        told,
        sinks="s_aux" in constants,
        query_scaling=scaling if scales_queries else 1.0,
        by_head=names == _BY_HEAD,
        cache_name=cache_name,
    )
    if not parts.out.startswith(f"{parts.attention}."):
        return fused  # it is more than its module, and the layer shows whether it is right
    candidates = [fused, replace(fused, rotate=None, rotation=None)]
    if fused.norms is not None:
        candidates.append(replace(fused, norms=replace(fused.norms, layout="rotated")))
    found: FusedAttention = _nearest(candidates, call, defaults)
    return found


def _nearest(candidates: Sequence[Any], call: Call, defaults: dict[str, Any]) -> Any:
    """The one of ``candidates`` that is nearest to its module, which several may compute but for roundings."""
    best, least = candidates[0], float("inf")
    for candidate in candidates:
        error = error_of_attention(candidate, call, defaults)
        if error < least:
            best, least = candidate, error
        if error == 0:
            break
    if least > MAX_ERROR:
        for products in best.products:
            products.separate()
        raise NotFused(f"{type(best.module).__name__} computes something else than its names say")
    return best


def _latent_attention(attention: Any, out: nn.Module, defaults: dict[str, Any], call: Call) -> FusedLatentAttention:
    module = sys.modules[type(attention).__module__]
    functions, eager = (getattr(module, name, None) for name in ("ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"))
    if functions is None or eager is None or not hasattr(attention, "expand_kv"):
        raise NotFused(f"{type(attention).__name__} keeps its latents in an unknown way")
    is_latent = attention._modules.get("q_a_proj") is not None
    rotations = {name for name in _code_of(attention).co_names if name.startswith(_ROTATE)}
    fused = FusedLatentAttention(
        attention,
        _merge([attention.q_a_proj if is_latent else attention.q_proj, attention.kv_a_proj_with_mqa]),
        _merge([out]),
        NormStep(attention.q_a_layernorm, find_norm(attention.q_a_layernorm)) if is_latent else None,
        _merge([attention.q_b_proj]) if is_latent else None,
        lambda *_: (),  # type: ignore[arg-type, return-value]
        functions,
        eager,
    )
    candidates = [replace(fused, rotate=getattr(module, name)) for name in sorted(rotations)]
    found: FusedLatentAttention = _nearest(candidates or [fused], call, defaults)
    return found


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


def _mlp(layer: nn.Module, parts: _Parts) -> FusedMlp:
    assert parts.mlp_layers is not None
    holder, _, name = parts.activation.rpartition(".")
    activation = getattr(layer.get_submodule(holder), name, None) if name else None
    if activation is None:
        raise NotFused("its activation is unknown")
    names, last, gated = parts.mlp_layers
    first, down = ([layer.get_submodule(_dotted(parts.mlp, each)) for each in own] for own in (names, (last,)))
    if reason := why_apart(down):
        raise NotFused(reason)
    return FusedMlp(_merge(first), _merge(down), activation, find_activation(activation), gated)


def _mixture(module: nn.Module, call: Call) -> FusedMixture:
    children = {name: child for name, child in module._modules.items() if child is not None}
    router, shared, experts = _child(module, _ROUTER), _child(module, _SHARED), children.get("experts")
    others = set(children) - {router, shared, _SHARED_GATE, "experts"}
    buffers = set(module._buffers) - {*CHOICE_BIAS}  # MiniMax-M2's router is called with it
    if type(experts) is not QuantExperts or not router or others or module._parameters or buffers:
        raise NotFused(f"{type(module).__name__} is called as it is")
    step, gate = find_router(children[router], module), children.get(_SHARED_GATE)
    fused = FusedMixture(module, step, experts, children.get(shared), gate)
    if not computes_mixture(fused, call):
        raise NotFused(f"{type(module).__name__} computes something else than its names say")
    return fused


def _dotted(*names: str) -> str:
    return ".".join(name for name in names if name)


def _merge(layers: Sequence[Any]) -> MergedWeights:
    if reason := why_apart(layers):
        raise NotFused(reason)
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


def _constants_of(module: nn.Module) -> list[Any]:
    """What is passed in calls that the module's ``forward`` makes, and by which names, among others."""
    found: list[Any] = []
    for constant in _code_of(module).co_consts:
        found += constant if isinstance(constant, tuple) else [constant]
    return found
