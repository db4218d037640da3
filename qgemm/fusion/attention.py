"""How an attention module computes, according to its children, their names and its code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.fusion.branches import NotFused, check_has_no_limits, child_of, code_of, merge
from qgemm.fusion.probe import find_norm, find_rotation
from qgemm.fusion.verify import MAX_ERROR, Call, error_of_attention
from qgemm.kernels.rotary.reference import position_factors_reference
from qgemm.nn.blocks.attention import (
    CACHES,
    SEQUENCES,
    SHARED_STATES,
    FusedAttention,
    HeadNorms,
    PositionScale,
    Rotation,
    SharedStates,
    Temperature,
    cosines_and_sines,
)
from qgemm.nn.blocks.cross_attention import KEY_VALUE_STATES, STATES, FusedCrossAttention
from qgemm.nn.blocks.latent_attention import FusedLatentAttention
from qgemm.nn.blocks.merged import MergedWeights, why_apart
from qgemm.nn.blocks.position_bias import POSITION_BIAS, PositionBias, attend
from qgemm.nn.blocks.steps import NormStep

# The names of queries, keys and values, or of a single layer for all of them.
_QUERY_KEY_VALUE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("qkv_proj",),
    ("c_attn",),
    ("query_key_value",),
    ("Wqkv",),
    ("qkv",),
    ("q_proj", "k_proj"),  # values are the keys
    ("q_proj",),  # keys and values come from another layer
)
_BY_HEAD = ("query_key_value",)
_LATENTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
OUT = ("o_proj", "dense", "out_proj", "c_proj", "out_lin", "Wo", "projection_layer", "projection", "proj", "o")
_HEAD_NORMS = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("qk_norm", "qk_norm"),
)
_VALUE_NORM = "v_norm"
_GATE = ("gate_proj", "g_proj")
_GATES = ("sigmoid", "softplus")
_FUNCTIONS, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"
_ROTATE, _ROTATE_COMPLEX = "apply_rotary_pos_emb", "apply_rotary_emb"
_ROTATIONS = "apply_rotary"  # the common beginning of all rotations' names
_SCALE_BY_POSITION = "get_llama_4_attn_scale"
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_COMPUTE_BIAS, _BIAS_TABLE = "compute_bias", "relative_attention_bias"
_BIAS_ARGUMENTS = ["query_length", "key_length", "device", "past_seen_tokens"]
_MASKS = ("attention_mask", "mask")
# All names in the code of attention that is just softmax(q @ k.T * scale + bias + mask) @ v, and its arguments.
_OPERATORS = {
    *("torch", "nn", "functional", "math", "matmul", "softmax", "Softmax", "sqrt", "dropout"),
    *("view", "reshape", "transpose", "permute", "contiguous", "size", "shape"),
    *("all_head_size", "attention_head_size", "num_attention_heads"),
}
_ARGUMENTS = {"self", "hidden_states", *_MASKS, POSITION_BIAS, "output_attentions", "kwargs"}


def _rotate_one_by_one(rotate: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both, ``[B, H, S, D]``, by a function that rotates one of them at a time."""
    return rotate(q, cos, sin), rotate(k, cos, sin)


def _rotate_tokens(rotate: Any, q: Tensor, k: Tensor, *angles: Tensor) -> tuple[Tensor, Tensor]:
    """Both, ``[B, H, S, D]``, by a function that rotates heads ``[B, S, H, D]``."""
    q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), *angles)
    return q.transpose(1, 2), k.transpose(1, 2)


def _rotate_complex(rotate: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both, ``[B, H, S, D]``, by a function that multiplies heads ``[B, S, H, D / 2]`` by complex numbers."""
    return _rotate_tokens(rotate, q, k, torch.complex(cos.float(), sin.float()))


def find_attention(
    attention: Any, out: nn.Module | None, defaults: Mapping[str, Any], call: Call, untold: Collection[str]
) -> FusedAttention | FusedLatentAttention:
    """How ``attention`` computes, whose last layer is ``out``, in a layer that was called with ``call``.

    ``defaults``: the arguments of the layer's ``forward``; ``untold``: those that its attention doesn't get.
    """
    if out is None:
        raise NotFused(f"the projections of {type(attention).__name__} are unknown")
    check_has_no_limits(attention)
    _check_knows_functions(attention)
    if _LATENTS[0] in attention._modules:
        return _latent_attention(attention, out, defaults, call)
    names = _projections(attention)
    if not names:
        raise NotFused(f"the projections of {type(attention).__name__} are unknown")
    functions, eager, scaling, head_dim = _function_and_sizes(attention)
    cache_name = _cache_name(attention, defaults)
    last = merge([out])
    qkv = merge([attention._modules[name] for name in names])
    gated = len(names) == 3 and qkv.layers[0].out_features == 2 * last.layers[0].in_features
    widths = {name: layer.out_features // head_dim for name, layer in zip(names, qkv.layers, strict=True)}
    heads, kv_heads = _heads(attention, widths, gated)
    rotate = _rotate(attention)
    columns = getattr(attention, "rotary_ndims", None)
    norms = _head_norms(attention, head_dim)
    values, value_norm = _values(attention, len(names) == 2, norms, head_dim)
    bias, table = _position_bias(attention)
    gate = attention._modules.get(child_of(attention, _GATE))
    used = *qkv.layers, out, value_norm, table, gate, *((norms.query, norms.key) if norms else ())
    _check_uses_all(attention, *used)
    fused = FusedAttention(
        module=attention,
        qkv=qkv,
        out=last,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norms=norms,
        rotate=rotate,
        rotated_columns=columns,
        rotation=_rotation(rotate, columns, call),
        functions=functions,
        eager=eager,
        scaling=scaling,
        told=_other_arguments(attention),
        sinks="s_aux" in constants_of(attention),
        by_head=names == _BY_HEAD,
        values=values,
        value_norm=value_norm,
        gated=gated,
        gate=None if gate is None else _merged_gate(gate, qkv),
        gate_function=_gate_function(attention),
        shared=_shared(attention),
        temperature=_temperature(attention),
        position_scale=_position_scale(attention),
        position_bias=bias,
        untold=tuple(untold),
        mask_name=_name_of(attention, _MASKS),
        cache_name=cache_name,
        packed=SEQUENCES in inspect.signature(type(attention).forward).parameters,
    )
    candidates = [fused, replace(fused, rotate=None, rotation=None)]
    if fused.norms is not None:
        candidates.append(replace(fused, norms=replace(fused.norms, layout="rotated")))
    found: FusedAttention = _nearest(_with_scaled_queries(candidates), call, defaults)
    return found


def _merged_gate(gate: Any, qkv: MergedWeights) -> MergedWeights:
    """The weights of ``gate``, whose input may be rows that are quantized for ``qkv``."""
    if reason := why_apart([*qkv.layers, gate]):
        raise NotFused(reason)
    return merge([gate])


def _gate_function(attention: nn.Module) -> str:
    """The function of a gate that the code names."""
    names = code_of(attention).co_names
    return next((name for name in _GATES if name in names), _GATES[0])


def is_attention(module: nn.Module) -> bool:
    """Whether ``module`` has projections with known names."""
    return bool(_projections(module)) and any(map(module._modules.get, OUT))


def _projections(module: nn.Module) -> tuple[str, ...]:
    """The names of its projections of queries, keys and values; none if they are unknown."""
    return next((names for names in _QUERY_KEY_VALUE if all(map(module._modules.get, names))), ())


def _heads(attention: Any, widths: Mapping[str, int], gated: bool) -> tuple[int, int]:
    """How many heads queries and keys have. ``widths``: how many heads each projection gives, gates included."""
    query, key, *_ = (*widths.values(), 0)
    if len(widths) == 1 and "q_proj" not in widths:  # queries, keys and values in one
        heads = getattr(attention.config, "num_attention_heads", None) or attention.num_heads
        return heads, (query - heads) // 2
    return query // (2 if gated else 1), key


def _other_arguments(attention: Any) -> dict[str, Any]:
    """The arguments of the attention function that not every module has."""
    told, constants = {}, constants_of(attention)
    if "sliding_window" in constants:
        told["sliding_window"] = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return told | _softcap(attention)


def _softcap(attention: Any) -> dict[str, Any]:
    return {"softcap": attention.attn_logit_softcapping} if "softcap" in constants_of(attention) else {}


def find_cross_attention(
    attention: Any, out: nn.Module | None, names: Mapping[str, str | None], defaults: Mapping[str, Any], call: Call
) -> FusedCrossAttention:
    """How ``attention`` to an encoder computes. ``names``: its names for the layer's arguments."""
    projections = _projections(attention)
    if out is None or len(projections) != 3:
        raise NotFused(f"the projections of {type(attention).__name__} are unknown")
    functions, eager, scaling, head_dim = _function_and_sizes(attention)
    query, key, value = (attention._modules[name] for name in projections)
    bias, table = _position_bias(attention)
    mask_name = _name_of(attention, _MASKS)
    _check_uses_all(attention, query, key, value, out, table)
    fused = FusedCrossAttention(
        module=attention,
        query=merge([query]),
        key_value=merge([key, value]),
        out=merge([out]),
        head_dim=head_dim,
        functions=functions,
        eager=eager,
        scaling=scaling,
        query_scaling=1.0,
        names={"attention_mask": mask_name, **names},
        cache_name=_cache_name(attention, defaults),
        states_name=_name_of(attention, (KEY_VALUE_STATES, STATES)),
        mask_name=mask_name,
        position_bias=bias,
        told=_softcap(attention),
    )
    found: FusedCrossAttention = _nearest(_with_scaled_queries([fused]), call, defaults)
    return found


def _with_scaled_queries(candidates: Sequence[Any]) -> list[Any]:
    """Adds variants of ``candidates`` that scale queries instead of scores.

    They come first if the code contains a 1.0, as a scale of scores would be. It may have another meaning, as in Llama
    4; the variants differ only in roundings. If the scores' scale is 1, because the model scales queries itself, as ESM
    does, variants come last.
    """
    if candidates[0].scaling == 1.0:
        return [*candidates, *(replace(each, query_scaling=each.head_dim**-0.5) for each in candidates)]
    if not any(type(each) is float and each == 1.0 for each in constants_of(candidates[0].module)):
        return [*candidates]
    return [*(replace(each, scaling=1.0, query_scaling=each.scaling) for each in candidates), *candidates]


def _check_uses_all(attention: nn.Module, *used: nn.Module | None) -> None:
    """Raises ``NotFused`` if ``attention`` has more parts than ``used``, whose effect a few tokens may not show.

    For example, an indexer only chooses keys if there are more of them than it keeps.
    """
    own = attention._modules.items()
    others = [name for name, child in own if child is not None and child not in used and [*child.parameters()]]
    others += [name for name, value in attention._parameters.items() if value is not None and name != "sinks"]
    if others:
        raise NotFused(f"{type(attention).__name__} has more than projections and norms: {', '.join(others)}")


def _check_knows_functions(attention: nn.Module) -> None:
    """Raises ``NotFused`` if ``attention`` calls other functions of its file, or gets a number that tells what to do.

    Few tokens without a cache may not show their effect: Hrm-Text gets the number of the cache's layer in this way.
    """
    for name, parameter in inspect.signature(type(attention).forward).parameters.items():
        if type(parameter.default) in (int, float):
            raise NotFused(f"{type(attention).__name__} takes {name}, too")
    module = sys.modules[type(attention).__module__]
    for name in sorted({*code_of(attention).co_names} - {_EAGER, _SCALE_BY_POSITION}):
        function = getattr(module, name, None)
        is_own = isinstance(function, FunctionType) and function.__module__ == module.__name__
        if is_own and not name.startswith(_ROTATIONS):
            raise NotFused(f"{type(attention).__name__} calls {name}, which is unknown")


def _cache_name(attention: nn.Module, defaults: Mapping[str, Any]) -> str:
    """The name of the cache among the layer's arguments, ``defaults``, or else among those of ``attention``."""
    names = {*defaults, *inspect.signature(type(attention).forward).parameters}
    return next((name for name in CACHES if name in names), CACHES[0])


def constants_of(module: nn.Module) -> list[Any]:
    """The constants in the module's ``forward``, among them values in calls and their names."""
    found: list[Any] = []
    for constant in code_of(module).co_consts:
        found += constant if isinstance(constant, tuple) else [constant]
    return found


def _function_and_sizes(attention: Any) -> tuple[Any, Any, float, int]:
    """transformers' attention functions by name, the module's own, the scale of scores, and the size of heads.

    Raises ``NotFused`` for a module that doesn't call such functions.
    """
    module = sys.modules[type(attention).__module__]
    functions, eager = (getattr(module, name, None) for name in (_FUNCTIONS, _EAGER))
    if _names_operators_alone(attention):
        functions, eager = None, attend
    scaling = getattr(attention, "scaling", getattr(attention, "scale", None))
    head_dim = next((getattr(attention, name) for name in _HEAD_DIM if hasattr(attention, name)), None)
    if scaling is None and head_dim is not None:
        scaling = head_dim**-0.5
    calls = eager is attend or (functions is not None and _FUNCTIONS in code_of(attention).co_names)
    if not calls or eager is None or not isinstance(scaling, float) or head_dim is None:
        raise NotFused(f"{type(attention).__name__} doesn't call an attention function of transformers")
    return functions, eager, scaling, head_dim


def _names_operators_alone(attention: nn.Module) -> bool:
    """Whether the code of ``attention`` only uses projections and the operations of a softmax of scores.

    If so, it computes the same for all tokens; its scale, and what it adds, are verified.
    """
    code = code_of(attention)
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = {*code.co_names} - {*OUT}.union(*_QUERY_KEY_VALUE)
    others = [each for each in code.co_consts if isinstance(each, float | CodeType)]
    known = names <= _OPERATORS and {*code.co_varnames[:count]} <= _ARGUMENTS and not others
    return known and not {"softmax", "Softmax"}.isdisjoint(names)


def _position_bias(attention: Any) -> tuple[PositionBias | None, nn.Module | None]:
    """The bias that the module adds to scores if it gets none, and the module of its learned part."""
    compute = getattr(attention, _COMPUTE_BIAS, None)
    if compute is None or POSITION_BIAS not in constants_of(attention):
        return None, None
    if [*inspect.signature(compute).parameters] != _BIAS_ARGUMENTS:
        raise NotFused(f"{type(attention).__name__} has a bias of positions of an unknown kind")
    table = attention._modules.get(_BIAS_TABLE)
    return PositionBias(table is not None), table


def _name_of(attention: nn.Module, names: Sequence[str]) -> str:
    """The one of ``names`` that is an argument of ``attention``; the first if none is."""
    parameters = inspect.signature(type(attention).forward).parameters
    return next((name for name in names if name in parameters), names[0])


def _rotate(attention: nn.Module) -> Any:
    """The function ``(q, k, cos, sin) -> (q, k)`` that the module calls, or None."""
    called = {name for name in code_of(attention).co_names if "rotary" in name and name.startswith("apply")}
    if not called:
        return None
    name = min(called)
    function: Any = getattr(sys.modules[type(attention).__module__], name, None)
    parameters = [] if function is None else [*inspect.signature(function).parameters.values()]
    needed = [each.name for each in parameters if each.default is each.empty]
    if len(called) == 1 and name == _ROTATE_COMPLEX and needed[2:] == ["freqs_cis"]:
        return partial(_rotate_complex, function)
    if len(called) == 1 and name == _ROTATE:
        # Its second argument is either the keys, or already the cosines.
        return partial(_rotate_one_by_one, function) if parameters[1].name == "cos" else function
    if len(called) == 1 and needed == ["q", "k", "cos", "sin"]:
        return partial(_rotate_tokens, function)
    raise NotFused(f"{type(attention).__name__} rotates by {name}, which is unknown")


def _temperature(attention: Any) -> Temperature | None:
    """The factor of queries in a layer without positions of its own, according to its attributes."""
    if not getattr(attention, "attn_temperature_tuning", False) or getattr(attention, "use_rope", True):
        return None
    return Temperature(attention.floor_scale, attention.attn_scale)


def _position_scale(attention: Any) -> PositionScale | None:
    """The factor of queries by their position, which is 1 for the first thousands."""
    if _SCALE_BY_POSITION not in code_of(attention).co_names:
        return None
    function: Any = getattr(sys.modules[type(attention).__module__], _SCALE_BY_POSITION)
    rope = attention.config.rope_parameters
    factor, length = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    positions = torch.arange(0, 20 * length, max(length // 4, 1), device="cpu")[None]
    wanted, found = function(positions, factor, length), position_factors_reference(positions, factor, length)
    is_known = wanted.shape == (1, 1, positions.shape[1], 1) and torch.allclose(found, wanted[:, 0, :, 0], 1e-6)
    return PositionScale(function, factor, length, is_known)


def _values(
    attention: nn.Module, of_keys: bool, norms: HeadNorms | None, head_dim: int
) -> tuple[str, nn.Module | None]:
    """The source of values, as in ``FusedAttention.values``, and the module of their norm."""
    norm = attention._modules.get(_VALUE_NORM)
    if norm is None:
        if of_keys:
            raise NotFused(f"the projections of {type(attention).__name__} are unknown")
        return "plain", None
    found, other = find_norm(norm, head_dim), None if norms is None else norms.norm
    if (
        norm._parameters
        or found is None
        or (other is not None and (found.eps, found.is_layer) != (other.eps, other.is_layer))
    ):
        raise NotFused(f"the norm of values of {type(attention).__name__} is unknown")
    return "of keys" if of_keys else "normalized", norm


def _shared(attention: Any) -> SharedStates | None:
    """The states that the module shares with others, according to its attributes."""
    if SHARED_STATES not in inspect.signature(type(attention).forward).parameters:
        return None
    takes, stores = (getattr(attention, name, False) for name in ("is_kv_shared_layer", "store_full_length_kv"))
    return SharedStates(attention.layer_type, stores) if takes or stores else None


def _nearest(candidates: Sequence[Any], call: Call, defaults: Mapping[str, Any]) -> Any:
    """The one of ``candidates`` that is nearest to its module; several may compute the same except for roundings."""
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


def _latent_attention(attention: Any, out: nn.Module, defaults: Mapping[str, Any], call: Call) -> FusedLatentAttention:
    module = sys.modules[type(attention).__module__]
    functions, eager = (getattr(module, name, None) for name in (_FUNCTIONS, _EAGER))
    if functions is None or eager is None or not hasattr(attention, "expand_kv"):
        raise NotFused(f"{type(attention).__name__} keeps its latents in an unknown way")
    is_latent = attention._modules.get("q_a_proj") is not None
    queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if is_latent else ("q_proj",)
    known = [attention._modules.get(name) for name in (*queries, *_LATENTS)]
    if None in known:
        raise NotFused(f"the projections of {type(attention).__name__} are unknown")
    _check_uses_all(attention, *known, out)
    rotations = {name for name in code_of(attention).co_names if name.startswith(_ROTATIONS)}
    fused = FusedLatentAttention(
        attention,
        merge([attention.q_a_proj if is_latent else attention.q_proj, attention.kv_a_proj_with_mqa]),
        merge([out]),
        NormStep(attention.q_a_layernorm, find_norm(attention.q_a_layernorm)) if is_latent else None,
        merge([attention.q_b_proj]) if is_latent else None,
        None,
        functions,
        eager,
        cache_name=_cache_name(attention, defaults),
        position_scale=_position_scale(attention),
    )
    candidates = [replace(fused, rotate=getattr(module, name)) for name in sorted(rotations)]
    found: FusedLatentAttention = _nearest(candidates or [fused], call, defaults)
    return found


def _rotation(rotate: Any, columns: int | None, call: Call) -> Rotation | None:
    positions = cosines_and_sines(call.others.get("position_embeddings"))
    if rotate is None or positions is None:
        return None
    return find_rotation(rotate, *positions, columns, call.x.dtype)


def _head_norms(attention: nn.Module, head_dim: int) -> HeadNorms | None:
    for names in _HEAD_NORMS:
        query, key = (attention._modules.get(name) for name in names)
        if query is None or isinstance(query, nn.Identity) or (key is None and not hasattr(attention, names[0])):
            continue
        key = query if key is None else key  # if there are no keys
        weight = query._parameters.get("weight")
        if weight is None:
            return HeadNorms(query, key, None, "transposed")
        is_whole = weight.dim() == 1 and weight.shape[0] > head_dim
        norms = [find_norm(module) for module in (query, key)]
        norm = norms[0] if norms[0] == norms[1] else None
        return HeadNorms(query, key, norm, "columns" if is_whole else "heads")
    return None
