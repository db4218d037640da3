"""The branches of a layer other than attention: MLPs, mixtures of experts, and a branch for a separate input."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from qgemm.fusion.probe import (
    CHOICE_BIAS,
    find_activation,
    find_router,
    find_scale,
    find_scaled_router,
    is_xielu,
    passes_on,
)
from qgemm.fusion.verify import Call, computes_mixture
from qgemm.nn.blocks.layer_input import FusedLayerInput
from qgemm.nn.blocks.merged import MergedWeights, why_apart
from qgemm.nn.blocks.mixture import FusedMixture, MlpAndMixture
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.steps import NormStep
from qgemm.nn.blocks.xielu import FusedXielu
from qgemm.nn.experts import QuantExperts, QuantSortedExperts

# The layers of an MLP before its activation, the layer after it, and whether it is gated.
MLP_LAYERS = (
    (("gate_proj", "up_proj"), "down_proj", True),
    (("gate_up_proj",), "down_proj", True),
    (("wi_0", "wi_1"), "wo", True),
    (("up_proj",), "down_proj", False),
    (("fc1",), "fc2", False),
    (("c_fc",), "c_proj", False),
    (("fc_in",), "fc_out", False),
    (("dense_h_to_4h",), "dense_4h_to_h", False),
    (("wi",), "wo", False),
    (("lin1",), "lin2", False),
    (("w1", "w3"), "w2", True),
    (("Wi",), "Wo", True),
    (("intermediate_dense",), "output_dense", False),
    (("input_linear",), "output_linear", True),
    (("linear_fc1",), "linear_fc2", False),
)
ACTIVATION = ("act_fn", "activation_fn", "act", "activation", "intermediate_act_fn", "gelu_impl")
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
# The names of a mixture's router.
_ROUTER = ("gate", "router")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_SHARED_GATE = "shared_expert_gate"
# For a layer with a mixture in parallel with its MLP: norms before the experts, and after both.
BESIDE = ("router", "experts")
BESIDE_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
# For a layer with a separate input.
LAYER_INPUT = ("per_layer_input_gate", "per_layer_projection")
LAYER_INPUT_NORM = "post_per_layer_input_norm"
# Names of attributes with a limit of values in a module.
_LIMITS = ("clip_qkv", "limit", "swiglu_limit")


class NotFused(Exception):
    """The reason why a branch isn't fused."""


def find_mlp(layer: nn.Module, mlp: str, layers: tuple[tuple[str, ...], str, bool], activation: str) -> FusedMlp:
    """The MLP in the child ``mlp`` of ``layer``, or in the layer itself.

    ``activation``: its dotted name; the MLP's name if the activation is a function in its code.
    """
    names, last, gated = layers
    first, down = ([layer.get_submodule(dotted(mlp, each)) for each in own] for own in (names, (last,)))
    check_has_no_limits(layer.get_submodule(mlp))
    own = layer.get_submodule(mlp)._modules.items() if mlp else ()
    known = {*names, last, *ACTIVATION}
    others = [name for name, child in own if child is not None and name not in known and not passes_on(child)]
    if others:
        raise NotFused(f"it has {others[0]}, which is unknown")
    if reason := why_apart(down):
        raise NotFused(reason)
    holder = mlp or names[0].rpartition(".")[0]
    if not why_apart(first) and not _fit(first, down[0], gated):
        raise NotFused("the sizes of its layers don't fit each other")
    act = _activation(layer, activation) if activation else _function(layer.get_submodule(holder))
    act = FusedXielu(act) if is_xielu(act) else act
    return FusedMlp(merge(first), merge(down), act, find_activation(act), gated)


def _fit(first: Sequence[Any], last: Any, gated: bool) -> bool:
    """Whether ``last`` has the inputs that an MLP makes of the outputs of ``first``."""
    return bool(sum(each.out_features for each in first) == (2 if gated else 1) * last.in_features)


def find_scales(layer: nn.Module, branches: int) -> tuple[tuple[nn.Module, str], ...]:
    """The vectors that multiply the outputs of the ``branches`` of ``layer``, in the order of its code, if any.

    Each is given as its holder, the layer or a child, and its name there. Raises ``NotFused`` for other parameters.
    """
    found: list[tuple[nn.Module, str]] = []
    for name in code_of(layer).co_names:
        own, child = layer._parameters.get(name), layer._modules.get(name)
        if own is not None and own.dim() == 1 and own.numel() > 1:
            found.append((layer, name))
        elif child is not None and (scale := find_scale(child)):
            found.append((child, scale))
    others = [name for name, own in layer._parameters.items() if own is not None and (layer, name) not in found]
    if others or len(found) not in (0, branches):
        raise NotFused(f"it has {min(others or [name for _, name in found])}, which is unknown")
    return tuple(found)


def find_layer_input(layer: nn.Module) -> FusedLayerInput:
    """The branch of ``layer`` that reads a separate input."""
    gate, projection = (layer.get_submodule(name) for name in LAYER_INPUT)
    if reason := why_apart([gate]) or why_apart([projection]):
        raise NotFused(reason)
    act = _activation(layer, child_of(layer, ACTIVATION))
    return FusedLayerInput(merge([gate]), merge([projection]), act, find_activation(act))


def find_mixture(module: nn.Module, call: Call, beside: nn.Module | None = None) -> FusedMixture:
    """The mixture in ``module``, in a layer that was called with ``call``. ``beside``: a shared expert there."""
    own = module._modules.items()
    children = {name: child for name, child in own if child is not None and not isinstance(child, nn.Identity)}
    router, shared, experts = child_of(module, _ROUTER), child_of(module, _SHARED), children.get("experts")
    others = set(children) - {router, shared, _SHARED_GATE, "experts"}
    # MiniMax-M2's router, and AFMoE's, get the bias as an argument.
    others |= {*module._buffers, *module._parameters} - {*CHOICE_BIAS}
    if type(experts) not in (QuantExperts, QuantSortedExperts) or not router or others:
        raise NotFused(f"{type(module).__name__} is called as it is")
    step, gate = find_router(children[router], module), children.get(_SHARED_GATE)
    assert isinstance(experts, QuantExperts)
    fused = FusedMixture(module, step, experts, children.get(shared), gate, isinstance(experts, QuantSortedExperts))
    if not computes_mixture(fused, call):
        raise NotFused(f"{type(module).__name__} computes something else than its names say")
    return fused if beside is None or fused.shared is not None else replace(fused, shared=beside)


def find_mlp_and_mixture(
    layer: nn.Module, mlp: FusedMlp, norms: tuple[str, str], steps: Mapping[str, NormStep]
) -> MlpAndMixture:
    """``mlp`` and the parallel mixture in ``layer``. ``norms``: the names of those before and after the MLP alone."""
    router, experts = (layer.get_submodule(name) for name in BESIDE)
    if type(experts) is not QuantExperts:
        raise NotFused(f"its experts are of class {type(experts).__name__}, not QuantExperts")
    before, after_mlp, after = (steps[name] for name in BESIDE_NORMS)
    step = find_scaled_router(router) or find_router(router, layer)
    return MlpAndMixture(mlp, steps[norms[0]], after_mlp, step, experts, before, after)


def check_has_no_limits(module: nn.Module) -> None:
    """Raises ``NotFused`` if ``module`` limits values below their dtype's range: a few tokens may not show it."""
    names = {*code_of(module).co_names}
    if not {"clamp", "clamp_"} & names or "finfo" in names:
        return
    places = product((module, getattr(module, "config", None)), _LIMITS)
    limit = next((getattr(holder, name) for holder, name in places if hasattr(holder, name)), 0.0)
    if limit is not None and limit < math.inf:
        raise NotFused(f"{type(module).__name__} limits its values")


def dotted(*names: str) -> str:
    """The dotted path of the names that aren't empty."""
    return ".".join(name for name in names if name)


def child_of(module: nn.Module, names: Sequence[str]) -> str:
    """The one of ``names`` that is a child of ``module``; empty if none is."""
    return next((name for name in names if module._modules.get(name) is not None), "")


def merge(layers: Sequence[Any]) -> MergedWeights:
    """Merges ``layers`` into one product."""
    if reason := why_apart(layers):
        raise NotFused(reason)
    merged = layers[0].merged
    if isinstance(merged, MergedWeights) and merged.layers == tuple(layers):
        return merged
    return MergedWeights(layers)


def _activation(layer: nn.Module, path: str) -> Callable[[Tensor], Tensor]:
    holder, _, name = path.rpartition(".")
    activation = getattr(layer.get_submodule(holder), name, None) if name else None
    if activation is None:
        raise NotFused("its activation is unknown")
    return activation  # type: ignore[no-any-return]


def _function(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
    names, own = code_of(mlp).co_names, inspect.unwrap(type(mlp).forward).__globals__
    called: list[Callable[[Tensor], Tensor]] = [own.get(name, act) for name, act in _FUNCTIONS.items() if name in names]
    if len(called) != 1:
        raise NotFused("its activation is unknown")
    return called[0]


def code_of(module: nn.Module) -> CodeType:
    """The code of its ``forward``."""
    code: CodeType = inspect.unwrap(type(module).forward).__code__
    return code
