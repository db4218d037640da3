"""Checks that a fused layer computes what the layer does: both run on the layer's inputs in a forward of the model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qgemm.fusion.probe import normal, uniform
from qgemm.fusion.siblings import SiblingWatch
from qgemm.nn import QuantLayer
from qgemm.nn.blocks.attention import CACHES, SEQUENCES, FusedAttention
from qgemm.nn.blocks.cross_attention import FusedCrossAttention
from qgemm.nn.blocks.latent_attention import FusedLatentAttention
from qgemm.nn.blocks.layer import CalledBranch, FusedLayer
from qgemm.nn.blocks.mixture import FusedMixture
from qgemm.nn.blocks.position_bias import POSITION_BIAS

MAX_ERROR = 0.02
"""The maximum difference between a fused layer's output and the layer's, relative to what the layer adds to its input.

If another order of a sum rounds a value to the next int8, it is off by less than 1 % of a row's maximum; a wrong
computation is off by far more.
"""

_SCALE_WEIGHT = 10
"""Roundings go up and down, value by value, and don't change the scale of most tokens. A candidate that multiplies by
a different number than the layer does is refused from 0.2 % on."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_SPREAD = 1.5  # of queries and keys

_Attention: TypeAlias = FusedAttention | FusedLatentAttention | FusedCrossAttention


@dataclass(frozen=True)
class Call:
    """A call of a layer: ``x`` and the other arguments by name, and what it returned."""

    x: Tensor
    others: Mapping[str, Any]
    output: Any


@contextmanager
def record_calls(layers: Iterable[nn.Module], watch: SiblingWatch) -> Iterator[dict[Any, Call]]:
    """Inside, the first call of each of ``layers`` is recorded, and ``watch`` observes calls; yields calls by layer."""
    calls: dict[Any, Call] = {}

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        others = dict(kwargs)
        parameters = [*inspect.signature(type(layer).forward).parameters.values()][1:]
        names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        if len(args) > len(names):
            return
        named = dict(zip(names, args, strict=False))
        x = named.pop(names[0], None)
        if x is None:
            x = others.pop(names[0], None)
        if x is None:  # it was passed under a name that the argument no longer has
            return
        # Copied, because code around a layer may change its output in place.
        kept = tuple(map(_copied, output)) if isinstance(output, tuple) else _copied(output)
        told = {**named, **others}.items()
        others = {name: _as_it_is(value) for name, value in told if name not in CACHES}
        calls.setdefault(layer, Call(x, others, kept))

    handles: list[Any] = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    handles += watch.hooks()
    try:
        with torch.no_grad():
            yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Inside, all of ``model`` is in eval mode, so that nothing is dropped."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def random_values(layer: nn.Module) -> Iterator[bool]:
    """Inside, ``layer`` has random values in place of those that show nothing; yields whether it has any.

    Such values are those of new models: weights of norms and scales that are all equal, mostly 1, and biases and gates
    of 0. A fused layer that ignores them, or uses them elsewhere, could compute the same until other values are loaded.
    Quantized layers keep their values.
    """
    generator = torch.Generator().manual_seed(0)
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for module in layer.modules():
        if isinstance(module, QuantLayer):
            continue
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        kept += [
            (own, name, value)
            for own in places
            for name, value in own.items()
            if name not in module._non_persistent_buffers_set and _shows_nothing(value)
        ]
    try:
        for own, name, value in kept:
            random = (0.25 + 0.5 * uniform(value.shape, generator)).to(value)
            others = random if not value.any() else value.detach() * (1 + random)
            own[name] = nn.Parameter(others, requires_grad=False) if isinstance(value, nn.Parameter) else others
        yield bool(kept)
    finally:
        for own, name, value in kept:
            own[name] = value


def _shows_nothing(value: Any) -> bool:
    """Whether all values of a parameter or a buffer are equal; a single value must be 0 or 1."""
    if type(value) not in (Tensor, nn.Parameter) or value.dtype not in _FLOATS or value.is_meta or not value.numel():
        return False
    least, most = (each.item() for each in value.detach().aminmax())
    return least == most and (value.numel() > 1 or most in (0.0, 1.0))


@torch.no_grad()
def called_again(layer: nn.Module, call: Call, defaults: Mapping[str, Any]) -> Call:
    """``call`` with what ``layer`` returns now. ``defaults``: the arguments of its ``forward``."""
    others = {name: _as_it_is(value) for name, value in call.others.items()}
    return replace(call, output=type(layer).forward(layer, call.x, **{**defaults, **others}))


@torch.no_grad()
def error_of(fused: FusedLayer, call: Call) -> float:
    """The difference between the output of ``fused`` and the layer's in ``call``, relative to what the layer adds."""
    expected = call.output[0] if isinstance(call.output, tuple) else call.output
    out, context = _output_of(fused, call)
    if out is None or out.shape != expected.shape or out.dtype != expected.dtype:
        return float("inf")
    if fused.returns_bias and not torch.equal(context[POSITION_BIAS], call.output[1]):
        return float("inf")
    return relative_error(out, expected, None if fused.form == "alone" else call.x)


@torch.no_grad()
def error_beside_activations(fused: FusedLayer, call: Call) -> float:
    """``error_of``, leaving out what an activation's own roundings explain, of which ``fused`` has fewer.

    With its modules' own activations ``fused`` is compared with the layer, and without, with these in float64.
    """
    exact, _ = _output_of(fused.with_own_activations(in_float64=True), call)
    if exact is None:
        return float("inf")
    others = call.output[1:] if isinstance(call.output, tuple) else ()
    of_exact = replace(call, output=(exact, *others))
    return max(error_of(fused.with_own_activations(), call), error_of(fused, of_exact))


def _output_of(fused: FusedLayer, call: Call) -> tuple[Tensor | None, MutableMapping[str, Any]]:
    """The output of ``fused``, None if it raises, and the arguments, some of which it may have set."""
    context, operands = {**fused.defaults, **call.others}, fused.operands()
    try:
        return None if operands is None else fused(call.x, operands, context), context
    except Exception:  # a wrong candidate may raise anything
        return None, context


@torch.no_grad()
def error_of_attention(fused: _Attention, call: Call, defaults: Mapping[str, Any]) -> float:
    """The relative difference between ``fused`` and its module, for random inputs whose scores differ.

    With a layer's small weights, scores hardly differ, and then the rotation of queries would hardly matter.
    """
    operands = [product.operands() for product in fused.products]
    if None in operands:
        return float("inf")
    generator = torch.Generator().manual_seed(0)
    x = normal(call.x.shape, generator).to(call.x)
    context = {**defaults, **call.others}
    names = _names_there(fused)
    context |= _other_scores(fused, x, context, generator)
    if context.get(SEQUENCES) is not None:  # the call may contain a single sequence
        length = x.shape[-2]
        context[SEQUENCES] = torch.tensor([0, length // 3, length], device="cpu").to(context[SEQUENCES])
    try:
        if isinstance(fused, FusedAttention) and fused.norms is None:
            x = x * (_SPREAD / operands[0].product(x, x.dtype).float().std()).to(x.dtype)  # type: ignore[union-attr]
        (out_of,) = fused.products[-1].layers
        behind = None if out_of in fused.module._modules.values() else out_of
        with _other_table(fused, generator):
            expected = CalledBranch(fused.module, True, names, behind=behind)(x, (), None, x.dtype, context)
            out = fused(x, tuple(operands), None, x.dtype, context)  # type: ignore[arg-type]
        return relative_error(out, expected)
    except Exception:  # a wrong candidate may raise anything
        return float("inf")


def _names_there(fused: _Attention) -> Mapping[str, str | None]:
    """The names of the layer's arguments in a call of its attention."""
    if isinstance(fused, FusedCrossAttention):
        return fused.names
    untold = dict.fromkeys(getattr(fused, "untold", ()))
    return {"attention_mask": getattr(fused, "mask_name", "attention_mask"), **untold}


def _other_scores(
    fused: _Attention, x: Tensor, context: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Tensor]:
    """Random values for what ``context`` adds to scores: a new model's biases and masks may show nothing."""
    given = ((name, context.get(name)) for name in ("attention_mask", POSITION_BIAS))
    shapes = {name: each.shape for name, each in given if isinstance(each, Tensor) and each.dtype in _FLOATS}
    if fused.functions is None:  # its own code may do anything with a mask
        shapes.setdefault("attention_mask", torch.Size((x.shape[0], 1, 1, x.shape[1])))
    return {name: normal(shape, generator).to(x) for name, shape in shapes.items()}


@contextmanager
def _other_table(fused: _Attention, generator: torch.Generator) -> Iterator[None]:
    """Inside, the module computes a random position bias if it learns one, because a new model's is close to 0."""
    bias = getattr(fused, POSITION_BIAS, None)
    parameters = fused.module.relative_attention_bias._parameters if bias is not None and bias.learned else {}
    own = parameters.get("weight")
    if own is None or own.dtype not in _FLOATS:
        yield
        return
    try:
        parameters["weight"] = nn.Parameter(normal(own.shape, generator).to(own))
        yield
    finally:
        parameters["weight"] = own


@torch.no_grad()
def computes_mixture(fused: FusedMixture, call: Call) -> bool:
    """Whether ``fused`` computes the same as its module for random inputs."""
    x = normal(call.x.shape, torch.Generator().manual_seed(0)).to(call.x)
    try:
        expected = CalledBranch(fused.module, False)(x, (), None, x.dtype, {})
        out = fused(x, (), None, x.dtype, {})
    except Exception:  # a wrong candidate may raise anything
        return False
    return relative_error(out, expected) <= MAX_ERROR


def relative_error(out: Tensor, expected: Tensor, x: Tensor | None = None) -> float:
    """The difference of ``out`` and ``expected``, relative to what that adds to ``x``; infinite if it isn't a number.

    A small difference counts as at least ``_SCALE_WEIGHT`` times the median token's difference in scale.
    """
    off, added = out.float() - expected.float(), expected.float() if x is None else expected.float() - x.float()
    scales = (off * added).sum(-1) / added.square().sum(-1)
    scale = scales.nan_to_num().median().abs()  # rows of zeros give NaN
    error = (off.norm() / added.norm()).item()
    if error <= MAX_ERROR:
        error = max(error, _SCALE_WEIGHT * scale.item())
    return error if error == error else float("inf")


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _as_it_is(value: Any) -> Any:
    """A copy, as it is now, of a mapping that layers write to."""
    return copy.copy(value) if isinstance(value, MutableMapping) else value
