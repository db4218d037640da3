"""Finds a model's layers that can be fused, and how each computes, by its children and their names.

Names don't tell everything, such as whether a layer rotates its queries, or in which order branches are added. So there
are several candidates, and ``verify.py`` finds the one that computes what the layer does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import nn

from qgemm.fusion import branches
from qgemm.fusion.attention import OUT, constants_of, find_attention, find_cross_attention, is_attention
from qgemm.fusion.branches import ACTIVATION, MLP_LAYERS, NotFused, child_of, code_of, dotted
from qgemm.fusion.orders import NORMS, Norms, is_of_other_form, norms_of_cross, orders_of_parts
from qgemm.fusion.probe import find_norm, find_scale, passes_on
from qgemm.fusion.verify import Call
from qgemm.nn.blocks.attention import CACHES
from qgemm.nn.blocks.cross_attention import KEY_VALUE_STATES, STATES
from qgemm.nn.blocks.fused_module import Places
from qgemm.nn.blocks.layer import Branch, CalledBranch, FusedLayer, Step
from qgemm.nn.blocks.layer_input import LAYER_INPUT
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.position_bias import POSITION_BIAS
from qgemm.nn.blocks.steps import NormStep

_ATTENTION = ("self_attn", "attention", "attn", "self_attention")
_SHARED_MLP = "shared_mlp"  # in a layer, beside its mixture or alone
_MLP = ("mlp", "block_sparse_moe", "feed_forward", "ffn", _SHARED_MLP)
_CROSS = ("encoder_attn", "cross_attention", "cross_attn")  # the first two may have a norm of that name
_CROSS_NORM = "{}_layer_norm"
# Names of a layer's arguments in a call of its attention to an encoder, and those that it alone or none gets.
_OF_ENCODER: dict[str, str | None] = {
    "attention_mask": None,
    STATES: KEY_VALUE_STATES,
    "encoder_attention_mask": "attention_mask",
}
_POSITIONS = ("position_ids", "position_embeddings")
_OF_ENCODER_ALONE = tuple(f"encoder_{name}" for name in _POSITIONS)
_CACHES = (*CACHES, "cache_params")
_SCALE = "layer_scalar"
_BERT = ("attention", "intermediate", "output")
_BERT_OUT = "attention.output.dense"
_INNER = ("self", "attention", "attn")  # attention inside a module that also contains what follows it


@dataclass(frozen=True)
class Candidates:
    """Ways in which a layer may compute: ``fused``, empty if it can't be fused; ``reason``: why a part isn't fused.

    ``parts``: the fused parts, for the report.
    """

    fused: tuple[FusedLayer, ...]
    parts: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class _Parts:
    """The parts of a layer, by their names in it.

    ``mixer``: the module that computes attention or what replaces it (``is_attention``); ``out``: the layer after it.
    ``crosses``: the attention to an encoder that follows, if any; ``cross_norms``: those before and after it. ``mlp``:
    the module; empty if its layers belong to the layer itself. ``beside``: whether a mixture runs in parallel with it.
    ``has_input``: whether the layer has a separate input.
    """

    mixer: str
    out: str
    mlp: str
    mlp_layers: tuple[tuple[str, ...], str, bool] | None
    activation: str
    norms: Collection[str]
    is_attention: bool = True
    crosses: str = ""
    beside: bool = False
    has_input: bool = False
    cross_norms: tuple[str, str] = ("", "")

    @property
    def every_norm(self) -> set[str]:
        """The names of all norms: ``norms``, and those of the attention to an encoder, a mixture and an input."""
        crosses = {*self.cross_norms} - {""} if self.crosses else ()
        beside = branches.BESIDE_NORMS if self.beside else ()
        return {*self.norms, *crosses, *beside, *([branches.LAYER_INPUT_NORM] if self.has_input else ())}


def is_layer(module: nn.Module) -> bool:
    """Whether ``module`` looks like a transformer layer: with attention or a replacement for it, an MLP, and norms."""
    children = module._modules
    if all(children.get(name) is not None for name in _BERT):
        return True
    if _find_single(module):
        return True
    has_mlp = child_of(module, _MLP) != "" or {"fc1", "fc2"} <= set(children)
    has_mixer = child_of(module, _ATTENTION) != "" or len(_others(module)) == 1
    return has_mixer and has_mlp and any(map(_is_norm, children.values()))


def _find_single(layer: nn.Module) -> tuple[str, str] | None:
    """The norm and the branch of a layer that only has these: an MLP, a mixture or attention. None for other layers."""
    children = _computing(layer)
    norms = [name for name, child in children.items() if _is_norm(child)]
    others = [name for name in children if name not in norms]
    if len(norms) != 1 or len(others) != 1:
        return None
    branch = children[others[0]]
    known = is_mlp(branch) or branch._modules.get("experts") is not None or is_attention(branch)
    return (norms[0], others[0]) if known else None


def _computing(module: nn.Module) -> dict[str, nn.Module]:
    """The children of ``module`` by name, except those that do nothing."""
    own = module._modules.items()
    return {name: child for name, child in own if child is not None and not passes_on(child)}


def _others(layer: nn.Module) -> list[str]:
    """The children of ``layer`` that compute something and are neither norms nor an MLP."""
    mlp = {child_of(layer, _MLP)} - {""} or {"fc1", "fc2"}
    known = {*mlp, *ACTIVATION, _SHARED_MLP}
    others = ((name, child) for name, child in _computing(layer).items() if name not in known)
    return [name for name, child in others if not _is_norm(child) and not find_scale(child)]


def _find_parts(layer: nn.Module, call: Call) -> _Parts:
    """The parts of ``layer`` in ``call``; raises ``NotFused`` if it has others."""
    has_states = call.others.get(STATES) is not None
    if all(layer._modules.get(name) is not None for name in _BERT):
        return _find_parts_of_bert(layer, has_states)
    children, others = set(layer._modules), set(_others(layer))
    attention, mlp = child_of(layer, _ATTENTION), child_of(layer, _MLP)
    norms = {name for name, child in layer._modules.items() if _is_norm(child)}
    cross, cross_norms = _find_cross(layer, norms, attention, mlp)
    beside = {*branches.BESIDE, *branches.BESIDE_NORMS} <= children
    has_input = {*branches.LAYER_INPUT, branches.LAYER_INPUT_NORM} <= children
    for names, own, is_there in (
        ((cross,), cross_norms, cross),
        (branches.BESIDE, branches.BESIDE_NORMS, beside),
        (branches.LAYER_INPUT, (branches.LAYER_INPUT_NORM,), has_input),
    ):
        if is_there:
            others -= {*names}
            norms -= {*own}
    if attention:
        others -= {attention}
        if others:
            raise NotFused(f"it has {min(others)}, which is unknown")
    elif len(others) != 1:
        raise NotFused(f"it has {', '.join(sorted(others))} in the place of attention")
    mixer = attention or others.pop()
    holder = layer.get_submodule(mlp)
    told = inspect.signature(type(holder).forward).parameters.values() if mlp else ()
    more = [each.name for each in [*told][3 if _adds(holder) else 2 :] if each.kind is not each.VAR_KEYWORD]
    if more:
        raise NotFused(f"its {mlp} takes {more[0]}, too")
    layers, activation = _layers_of_mlp(holder)
    return _Parts(
        *_find_mixer(layer, mixer),
        mlp,
        layers,
        activation and dotted(mlp, activation),
        frozenset(norms),
        attention != "",
        cross if has_states else "",
        beside,
        has_input,
        cross_norms,
    )


def _find_cross(layer: nn.Module, norms: Collection[str], attention: str, mlp: str) -> tuple[str, tuple[str, str]]:
    """The name of the attention to an encoder in ``layer``, and of the norms before and after it; empty if unknown.

    A norm that is called as it is comes before or after it, like the layer's others.
    """
    cross = child_of(layer, _CROSS)
    own = _CROSS_NORM.format(cross)
    found = (own, "") if own in norms else norms_of_cross(layer, norms, attention, cross, mlp) if cross else ("", "")
    return (cross, found) if found[0] else ("", ("", ""))


def _find_mixer(layer: nn.Module, name: str) -> tuple[str, str]:
    """The paths of the module that mixes tokens in the child ``name`` of ``layer`` and of a layer after it, if any."""
    holder = layer.get_submodule(name)
    inner, output = child_of(holder, _INNER), holder._modules.get("output")
    if output is not None and not (holder._parameters or output._parameters):
        if {*_computing(output)} == {"dense"} and {*_computing(holder)} == {inner, "output"}:
            return f"{name}.{inner}", f"{name}.output.dense"
    out = child_of(holder, OUT)
    return name, out and f"{name}.{out}"


def _find_parts_of_bert(layer: nn.Module, has_states: bool) -> _Parts:
    crosses = layer._modules.get("crossattention") is not None
    if getattr(layer, "chunk_size_feed_forward", 0) or (crosses and has_states):
        raise NotFused("it has cross attention, or an MLP in chunks")
    mixer = dotted("attention", child_of(layer.get_submodule("attention"), _INNER))
    elsewhere = (f"{mixer}.", "crossattention.")
    modules = {name: each for name, each in layer.named_modules() if not f"{name}.".startswith(elsewhere)}
    out = _BERT_OUT if _BERT_OUT in modules else ""
    dense = {out, "intermediate.dense", "output.dense"} - {""}
    norms = [name for name, module in modules.items() if _is_norm(module)]
    own = {name for name, module in modules.items() if name and module._parameters}
    if own != {*dense, *norms} or len(norms) != 2 or mixer == "attention":
        raise NotFused("its parts have unknown names")
    last = child_of(layer.get_submodule(mixer), OUT)
    out = out or (last and f"{mixer}.{last}")
    layers = (("intermediate.dense",), "output.dense", False)
    act = child_of(layer.get_submodule("intermediate"), ACTIVATION)
    return _Parts(mixer, out, "", layers, act and f"intermediate.{act}", tuple(norms))


def find_candidates(layer: nn.Module, call: Call) -> Candidates:
    """How ``layer`` may compute, judging by a ``call`` of it. Places the weights of the fused parts."""
    try:
        if single := _find_single(layer):
            branches.find_scales(layer, 0)
            return _candidates_of_single(layer, *single, call)
        found = _find_parts(layer, call)
        scales = branches.find_scales(layer, 2 + bool(found.crosses) + found.has_input)
    except NotFused as error:
        return Candidates((), (), str(error))
    orders = [each for each in NORMS if each.names == {*found.norms}] or orders_of_parts(
        layer, found.norms, found.mixer, found.mlp
    )
    orders = [each for each in orders if each.form == "in a row" or not scales]
    if not orders:
        return Candidates((), (), f"norms called {', '.join(sorted(found.norms))} are unknown")
    made = _find_branches(layer, found, call)
    if not made.parts or made.lacks:
        for product in [product for branch in made.branches for product in branch.products]:
            product.separate()
        return Candidates((), (), "; ".join(made.reasons))
    passed_over, called = _places(layer, made.branches, made.norms.values())
    fused = [
        FusedLayer(
            order.form,
            _steps(found, order, made, scales),
            multiplier=_multiplier(layer),
            residual_first=residual_first,
            scale=(layer, _SCALE) if _SCALE in layer._buffers else None,
            limited={"clamp", "finfo"} <= {*code_of(layer).co_names},
            crosses=found.crosses != "",
            defaults=arguments_of(layer),
            passed_over=passed_over,
            called=called,
        )
        for order in orders
        if not is_of_other_form(layer, orders, order)
        for residual_first in ((True, False) if order.form == "side by side" else (True,))
    ]
    return Candidates(tuple(fused), tuple(made.parts), "; ".join(made.reasons))


def _candidates_of_single(layer: nn.Module, norm: str, name: str, call: Call) -> Candidates:
    """Candidates for a layer with a single branch, ``name``, after ``norm``."""
    module, defaults = layer.get_submodule(name), arguments_of(layer)
    step = NormStep(layer.get_submodule(norm), find_norm(layer.get_submodule(norm)))
    crosses = any(call.others.get(each) is not None for each in (STATES, KEY_VALUE_STATES))
    branch: Branch
    try:
        if module._modules.get("experts") is not None:
            part, branch = "mixture", branches.find_mixture(module, call)
        elif is_mlp(module):
            part, branch = "mlp", _find_mlp(module)
        else:
            out = module._modules[child_of(module, OUT)]
            if crosses:
                part, branch = "cross attention", find_cross_attention(module, out, {}, defaults, call)
            else:
                part, branch = "attention", find_attention(module, out, defaults, call, ())
    except NotFused as error:
        return Candidates((), (), f"{name}: {error}")
    passed_over, called = _places(layer, [branch], [step])
    fused = FusedLayer(
        "in a row",
        (Step(branch, step),),
        crosses=crosses,
        defaults=defaults,
        passed_over=passed_over,
        called=called,
        returns_bias=POSITION_BIAS in defaults and getattr(branch, POSITION_BIAS, None) is not None,
    )
    return Candidates((fused,), (part,), "")


class _Branches:
    """The branches of a layer by kind, with its norms by name.

    ``parts``: the fused ones; ``reasons``: why the rest isn't fused; ``lacks``: whether an indispensable one is
    missing.
    """

    def __init__(self, norms: Mapping[str, NormStep]) -> None:
        """Starts without branches."""
        self.norms = norms
        self.of: dict[str, Branch] = {}
        self.parts: list[str] = []
        self.reasons: list[str] = []
        self.lacks = False

    @property
    def branches(self) -> list[Branch]:
        return list(self.of.values())

    def add(self, part: str, name: str, find: Callable[[], Branch], called: CalledBranch | None) -> Branch | None:
        """The result of ``find``, or ``called`` if it raises ``NotFused``. ``name``: the module's, for the reason."""
        try:
            found: Branch | None = find()
            self.parts.append(part)
        except NotFused as error:
            self.reasons.append(f"{name}: {error}")
            found, self.lacks = called, self.lacks or called is None
        if found is not None:
            self.of[part] = found
        return found


def _find_branches(layer: nn.Module, found: _Parts, call: Call) -> _Branches:
    norms = {name: layer.get_submodule(name) for name in found.every_norm}
    made = _Branches({name: NormStep(norm, find_norm(norm)) for name, norm in norms.items()})
    _add_mixer(made, layer, found, call)
    if found.crosses:
        cross, defaults = layer.get_submodule(found.crosses), arguments_of(layer)
        out = layer.get_submodule(dotted(found.crosses, child_of(cross, OUT)))
        states = next((name for name in (KEY_VALUE_STATES, STATES) if name in arguments_of(cross)), KEY_VALUE_STATES)
        names = {**_OF_ENCODER, STATES: states, **dict.fromkeys((*_POSITIONS, *_OF_ENCODER_ALONE))}
        find: Callable[[], Branch] = partial(find_cross_attention, cross, out, names, defaults, call)
        called_cross = CalledBranch(cross, True, names) if _has_own_norm(found) else None
        made.add("cross attention", found.crosses, find, called_cross)
    module = layer.get_submodule(found.mlp)
    called = CalledBranch(module, False) if found.mlp else None
    if found.mlp_layers is None:
        shared = layer._modules.get(_SHARED_MLP)
        find = partial(branches.find_mixture, module, call, shared)
        # If the mixture is called as a module, the shared expert beside it wouldn't be included.
        made.add("mixture", found.mlp, find, called if shared is None else None)
    else:
        find = partial(branches.find_mlp, layer, found.mlp, found.mlp_layers, found.activation)
        made.add("mlp", found.mlp or "the MLP", find, None if found.beside else called)
    if found.has_input:
        made.add("layer input", branches.LAYER_INPUT[0], partial(branches.find_layer_input, layer), None)
    mlp = made.of.get("mlp")
    if found.beside and isinstance(mlp, FusedMlp):
        order = next(each for each in NORMS if each.names == found.norms)
        find = partial(branches.find_mlp_and_mixture, layer, mlp, (order.mlp, order.mlp_out), made.norms)
        made.add("mixture", "experts", find, None)
    return made


def _add_mixer(made: _Branches, layer: nn.Module, found: _Parts, call: Call) -> None:
    """Adds the attention of ``layer``, or what replaces it, to ``made``."""
    defaults, mixer = arguments_of(layer), layer.get_submodule(found.mixer)
    if not found.is_attention:
        made.of["attention"] = CalledBranch(mixer, False, _told(layer, mixer, defaults))
        made.reasons.append(f"{found.mixer}: {type(mixer).__name__} is called as it is")
        return
    out = layer.get_submodule(found.out) if found.out else None
    untold: dict[str, str | None] = dict.fromkeys((*_OF_ENCODER, *_OF_ENCODER_ALONE) if found.crosses else ())
    untold.pop("attention_mask", None)
    untold |= {LAYER_INPUT: None} if found.has_input else {}
    names = {**untold, **_other_cache(mixer, defaults)}
    behind = None if out in mixer._modules.values() else out
    find = partial(find_attention, mixer, out, defaults, call, untold)
    called = CalledBranch(mixer, True, names, _adds(mixer), behind=behind)
    made.add("attention", found.mixer, find, called if _has_own_norm(found) else None)


def _has_own_norm(found: _Parts) -> bool:
    """Whether attention to an encoder, if any, has a norm of its name: then both kinds get the layer's own cache."""
    return not found.crosses or found.cross_norms[0] == _CROSS_NORM.format(found.crosses)


def _steps(found: _Parts, order: Norms, made: _Branches, scales: Sequence[tuple[nn.Module, str]]) -> tuple[Step, ...]:
    """The steps of a layer whose norms have this ``order``. ``scales``: for all branches or for none."""
    norms, of = made.norms, made.of
    steps = [Step(of["attention"], norms.get(order.attention), norms.get(order.attention_out))]
    if found.crosses:
        before, after = map(norms.get, found.cross_norms[::-1] if order.form == "norms last" else found.cross_norms)
        steps.append(Step(of["cross attention"], before, after))
    if found.beside:
        steps.append(Step(of["mixture"], None, norms.get(order.mlp_out)))
    else:
        steps.append(Step(of["mlp" if "mlp" in of else "mixture"], norms.get(order.mlp), norms.get(order.mlp_out)))
    if found.has_input:
        steps.append(Step(of["layer input"], None, norms[branches.LAYER_INPUT_NORM]))
    return tuple([replace(step, scale=scale) for step, scale in zip_longest(steps, scales)])


def _multiplier(layer: nn.Module) -> float:
    values = (getattr(layer, name, None) for name in ("residual_multiplier", "residual_scale"))
    return next((value for value in values if isinstance(value, int | float)), 1.0)


def arguments_of(layer: nn.Module) -> dict[str, Any]:
    """The arguments of ``forward`` after the first, in order, with their defaults, or None where there is none."""
    parameters = dict(list(inspect.signature(type(layer).forward).parameters.items())[2:])
    return {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def _told(layer: nn.Module, mixer: nn.Module, defaults: Mapping[str, Any]) -> dict[str, str | None]:
    """The arguments of ``mixer``, which isn't attention: the parameters that the code of ``layer`` names.

    They keep the layer's names.
    """
    named = constants_of(layer)
    told: dict[str, str | None] = {
        name: name for name in list(inspect.signature(type(mixer).forward).parameters)[2:] if name in named
    }
    others = _other_cache(mixer, defaults)
    return {name: name for name in told if name not in others.values()} | others


def _adds(module: nn.Module) -> bool:
    """Whether ``module`` adds the residual itself, as BLOOM's do."""
    return list(inspect.signature(type(module).forward).parameters)[2:3] == ["residual"]


def _other_cache(module: nn.Module, defaults: Mapping[str, Any]) -> dict[str, str | None]:
    """The name that ``module`` has for the layer's cache, given the layer's arguments ``defaults``, if it differs."""
    wanted = set(inspect.signature(type(module).forward).parameters)
    own, there = (next((name for name in _CACHES if name in names), None) for names in (defaults, wanted))
    return {own: there} if own is not None and there is not None and own != there else {}


def is_mlp(module: nn.Module) -> bool:
    """Whether ``module`` looks like an MLP: two or three linear layers and an activation, and nothing else."""
    children = {*_computing(module)}
    return any(children - {*ACTIVATION} == {*first, last} for first, last, _ in MLP_LAYERS)


def candidates_of_mlp(module: nn.Module) -> Candidates:
    """How a separate MLP computes."""
    try:
        mlp = _find_mlp(module)
    except NotFused as error:
        return Candidates((), (), str(error))
    passed_over, called = _places(module, [mlp], ())
    return Candidates((FusedLayer("alone", (Step(mlp),), passed_over=passed_over, called=called),), ("mlp",), "")


def _find_mlp(module: nn.Module) -> FusedMlp:
    layers, activation = _layers_of_mlp(module)
    assert layers is not None
    return branches.find_mlp(module, "", layers, activation)


def _layers_of_mlp(module: nn.Module) -> tuple[tuple[tuple[str, ...], str, bool] | None, str]:
    """The layers of an MLP in ``module``, as in ``MLP_LAYERS``, and its activation's name; empty if it has none."""
    layers = next((each for each in MLP_LAYERS if {*each[0], each[1]} <= set(module._modules)), None)
    return layers, next((name for name in ACTIVATION if callable(getattr(module, name, None))), "")


def find_norm_step(module: nn.Module) -> NormStep | None:
    """What a separate norm computes, if that takes several kernels: PyTorch's own norms take one."""
    if not _is_norm(module) or type(module) in (nn.LayerNorm, nn.RMSNorm):
        return None
    norm = find_norm(module)
    of_pytorch = isinstance(module, nn.LayerNorm | nn.RMSNorm)
    return None if norm is None or (of_pytorch and not norm.adds_one) else NormStep(module, norm)


def _places(layer: nn.Module, found: Iterable[Branch], norms: Iterable[NormStep]) -> tuple[Places, Places]:
    """``places`` of a layer with these branches and norms."""
    called = {step.module for step in norms if step.norm is None}
    for branch in found:
        own = (branch.module, branch.behind) if isinstance(branch, CalledBranch) else getattr(branch, "called", ())
        called |= {*own} - {None}
    return places(layer, called)


def places(layer: nn.Module, called: Collection[nn.Module]) -> tuple[Places, Places]:
    """The modules in ``layer`` that are bypassed, and those that are ``called``, each with its holder and name."""

    def below(holder: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
        for name, child in holder._modules.items():
            if child is not None:
                yield holder, name, child
                if child not in called:
                    yield from below(child)

    found = tuple(below(layer))
    return tuple(each for each in found if each[-1] not in called), tuple(each for each in found if each[-1] in called)


def _is_norm(module: nn.Module | None) -> bool:
    # In PreLayerNorm models, the names of all classes contain it.
    return module is not None and "norm" in type(module).__name__.lower() and not module._modules
