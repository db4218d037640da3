"""``fuse``: makes the layers of a quantized transformer compute in fewer kernels, in place; ``unfuse`` undoes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qgemm.arguments import check_model
from qgemm.fusion.diffusion import fuse_block, is_block
from qgemm.fusion.inputs import call_parts, tokens
from qgemm.fusion.probe import find_angles, find_own_frequencies
from qgemm.fusion.report import FusionRecord, FusionReport
from qgemm.fusion.siblings import SiblingWatch
from qgemm.fusion.structure import (
    arguments_of,
    candidates_of_mlp,
    find_candidates,
    find_norm_step,
    is_layer,
    is_mlp,
)
from qgemm.fusion.verify import (
    MAX_ERROR,
    Call,
    called_again,
    error_beside_activations,
    error_of,
    in_eval,
    random_values,
    record_calls,
)
from qgemm.nn.blocks.angles import FusedAngles
from qgemm.nn.blocks.binding import bind, fused_of, unbind
from qgemm.nn.blocks.fused_module import FusedModule
from qgemm.nn.blocks.layer import FusedLayer
from qgemm.nn.blocks.norm import FusedNorm
from qgemm.nn.blocks.position_bias import POSITION_BIAS
from qgemm.nn.blocks.siblings import FusedSibling, Siblings
from qgemm.nn.quant_layer import has_quant_layers, quant_layers

Model = TypeVar("Model", bound=nn.Module)


def fuse(model: Model, inputs: Mapping[str, Any] | None = None) -> Model:
    """Fuses the kernels of a quantized transformer's layers, in place, and returns ``model``.

    Layers with the same input become one product; norms, residuals and activations are fused with the kernels before or
    after them. Modules, parameters and their names stay, so that saving, loading, adapters and hooks work as before.
    Calls that a fused layer doesn't support (training, attention weights, hooks on modules that it bypasses) run the
    model's own code. ``qgemm.fusion_report(model)`` lists what was fused, and why the rest wasn't.

    Each fused layer is compared with the original one before it replaces it. ``inputs``: keyword arguments of the
    model's forward for this comparison; None uses a few tokens. Parts that it doesn't call, such as a vision tower, are
    called with random images or sounds. A layer whose outputs differ stays as it was.

    Raises ``ValueError`` for a model without quantized layers, or one that FSDP has sharded. Call it again after layers
    were added or replaced.
    """
    check_model(model)
    if not has_quant_layers(model):
        raise ValueError(f"{type(model).__name__} holds no quantized layer to fuse: call quantize_model first")
    for name, layer in quant_layers(model).items():
        if any(type(each.detach()) is not Tensor for each in layer.parameters(recurse=False)):
            raise ValueError(f"{name} is sharded among processes, by FSDP: call fuse before fully_shard")
    # Those of TorchScript compute by themselves.
    modules = {n: each for n, each in model.named_modules() if not isinstance(each, torch.jit.ScriptModule)}
    layers = {name: module for name, module in modules.items() if is_layer(module)}
    # A part of a layer, such as MPNet's attention with its norm, isn't a layer itself.
    layers = {name: module for name, module in layers.items() if name.rpartition(".")[0] not in layers}
    mlps = {name: module for name, module in modules.items() if is_mlp(module) and name not in layers}
    blocks = {name: module for name, module in modules.items() if is_block(module)}
    for module in modules.values():
        unbind(module)
    watch = SiblingWatch(modules)
    with in_eval(model):
        calls, problem = _calls(model, {**layers, **mlps}, inputs, watch)
        records = _fuse_layers(layers, mlps, calls, problem)
        records |= {name: fuse_block(name, block) for name, block in blocks.items()}
    ordered = tuple(records[name] for name in modules if name in records)
    others = (*_fuse_others(modules), *_fuse_siblings(modules, watch))
    model._qgemm_fusions = FusionReport(ordered, others)  # type: ignore[assignment]
    return model


def unfuse(model: Model) -> Model:
    """Undoes ``fuse``, in place, and returns ``model``: every layer computes as its class does again."""
    check_model(model)
    for module in model.modules():
        unbind(module)
    vars(model).pop("_qgemm_fusions", None)
    return model


def fusion_report(model: nn.Module) -> FusionReport:
    """Reports what ``fuse`` did to ``model``. Raises ``ValueError`` if it wasn't called yet."""
    check_model(model)
    stored = getattr(model, "_qgemm_fusions", None)
    if not isinstance(stored, FusionReport):
        raise ValueError(f"{type(model).__name__} wasn't fused: qgemm.fuse(model) does that")
    return stored


def _fuse_layers(
    layers: Mapping[str, nn.Module], mlps: Mapping[str, nn.Module], calls: Mapping[Any, Call], problem: str
) -> dict[str, FusionRecord]:
    """Fuses ``layers``, and ``mlps`` that aren't part of a layer; ``problem``: why there are no ``calls``."""
    records = {name: _fuse_layer(name, layer, calls.get(layer), problem) for name, layer in layers.items()}
    for name, mlp in mlps.items():
        # The other MLPs are part of a layer.
        if not any(name.startswith(f"{layer}.") and "mlp" in record.parts for layer, record in records.items()):
            record = _fuse_layer(name, mlp, calls.get(mlp), problem)
            if record.parts or name.rpartition(".")[0] not in layers:  # otherwise the layer's record has the reason
                records[name] = record
    return records


def _fuse_layer(name: str, layer: nn.Module, call: Call | None, problem: str) -> FusionRecord:
    """Fuses a layer, or a separate MLP, that was called with ``call``."""
    kind = type(layer).__name__
    if call is None:
        reason = problem or "it can't be verified: the model's forward doesn't call it, or by old names of arguments"
        return FusionRecord(name, kind, (), reason, None)
    if "forward" in vars(layer):
        return FusionRecord(name, kind, (), "its forward was replaced, as accelerate's hooks do", None)
    with random_values(layer) as are_random:
        try:
            its_call = called_again(layer, call, arguments_of(layer)) if are_random else call
        except Exception as raised:  # a layer may raise anything
            reason = f"it can't be verified: it can't be called again ({type(raised).__name__}: {raised})"
            return FusionRecord(name, kind, (), reason, None)
        found = find_candidates(layer, its_call) if is_layer(layer) else candidates_of_mlp(layer)
        fused, error, reason = _choose(found.fused, its_call)
    if fused is not None and are_random:
        fused, error, reason = _choose((fused,), call)
    for candidate in found.fused:
        if fused is None or candidate.products != fused.products:
            candidate.separate()
    if fused is not None:
        bind(layer, fused)
        reason = _why_it_waits(layer, fused)
    parts = found.parts if fused is not None else ()
    return FusionRecord(name, kind, parts, "; ".join(filter(None, (found.reason, reason))), error)


def _why_it_waits(layer: nn.Module, fused: FusedLayer) -> str:
    """Why ``layer`` computes as its class does for now; empty if it doesn't."""
    if not (watched := fused.watched()):
        return ""
    name = next(name for name, module in layer.named_modules() if module is watched[0])
    return f"while {name} has a hook or a forward of its own, the layer computes as its class"


def _fuse_others(modules: Mapping[str, nn.Module]) -> Iterator[FusionRecord]:
    """Fuses the norms and rotary embeddings that are called: those outside of fused layers, and some inside."""
    layers = [fused for fused in map(fused_of, modules.values()) if isinstance(fused, FusedModule)]
    passed_over = {module for fused in layers for _, _, module in fused.passed_over}
    for name, module in modules.items():
        if module in passed_over or "forward" in vars(module):
            continue
        if step := find_norm_step(module):
            bind(module, FusedNorm(step))
            yield FusionRecord(name, type(module).__name__, ("norm",), "", None)
        elif tables := find_angles(module):
            axes = {each: table.axes_on(torch.device("cpu")) for each, table in tables.items()}
            bind(module, FusedAngles(module, tables, find_own_frequencies(module, tables), axes))
            yield FusionRecord(name, type(module).__name__, ("rotary",), "", 0.0)


def _fuse_siblings(modules: Mapping[str, nn.Module], watch: SiblingWatch) -> Iterator[FusionRecord]:
    """Merges layers outside of fused ones that read the same input, if their products keep the same bits."""
    for name, layers in list(watch.found()):
        siblings = Siblings(layers)
        for place, layer in enumerate(layers):
            bind(layer, FusedSibling(siblings, place))
        yield FusionRecord(name, type(modules[name]).__name__, ("products",), "", 0.0)


def _calls(
    model: nn.Module, layers: Mapping[str, nn.Module], inputs: Mapping[str, Any] | None, watch: SiblingWatch
) -> tuple[Mapping[Any, Call], str]:
    """Calls of the layers, by layer; and why the model itself can't be called, if so."""
    if any(parameter.is_meta for parameter in model.parameters()) and not any(
        hasattr(module, "_hf_hook") for module in model.modules()
    ):
        return {}, "it can't be verified before the model has values: fuse it again then"
    with record_calls(layers.values(), watch) as calls:
        problem = _call(model, inputs)
        if inputs is None or not problem:
            call_parts(model, layers.values(), calls)
    return calls, problem


def _call(model: nn.Module, inputs: Mapping[str, Any] | None) -> str:
    """Calls ``model`` with ``inputs``, or with a few tokens; returns why it can't be called, if so."""
    if inputs is None and not hasattr(model, "dummy_inputs"):
        return "pass inputs, on which it can be verified"
    try:
        model(**(tokens(model) if inputs is None else inputs))
    except Exception as error:  # a model's forward may raise anything
        given = "its own dummy_inputs: pass others as inputs" if inputs is None else "the inputs passed"
        return f"it can't be verified: the model can't take {given} ({type(error).__name__}: {error})"
    return ""


def _returns_bias(call: Call) -> bool:
    """Whether a layer returns the position bias that it got or made, instead of attention's weights."""
    given, returned = call.others.get(POSITION_BIAS, ...), call.output[1]
    return returned is not None and (given is None or (isinstance(given, Tensor) and torch.equal(given, returned)))


def _why_not_returned(fused: FusedLayer, call: Call, returned: int) -> str:
    """Why ``fused`` can't return the ``returned`` values that the layer returned in ``call``; empty if it can."""
    if returned > 2 + fused.returns_bias:
        return f"it returns {returned} values"
    if returned == 2 and not fused.returns_bias:
        if _returns_bias(call):
            return "it returns a bias for the next layer"
        if call.output[1] is not None and getattr(fused.steps[0].branch, "functions", ...) is None:
            return "it returns the weights of attention"
    return ""


def _choose(candidates: tuple[FusedLayer, ...], call: Call) -> tuple[FusedLayer | None, float | None, str]:
    """The one of ``candidates`` that computes what the layer does in ``call``, its error, and why none does."""
    if not candidates:
        return None, None, ""
    returned = len(call.output) if isinstance(call.output, tuple) else 0
    if reason := _why_not_returned(candidates[0], call, returned):
        return None, None, reason
    best = candidates[0]
    if len(candidates) > 1:  # they may differ in roundings alone, of which an activation's own may be more
        best = min(candidates, key=lambda candidate: error_of(candidate.with_own_activations(), call))
    error = error_of(best, call)
    if MAX_ERROR < error < float("inf"):
        error = min(error, error_beside_activations(best, call))
    if error <= MAX_ERROR:
        return replace(best, returned=returned), error, ""
    off = f" (off by {error:.0%})" if error < float("inf") else ""
    return None, error, f"it computes something else than its names say{off}"
