"""Tensor parallelism of transformers with quantized layers: which part of a layer goes to which process.

transformers splits parameters by a plan of styles while it reads them, as DTensors, and wraps each layer's ``forward``.
A quantized layer itself knows how its parameters are split (``QuantLayer.splits``), so the styles that a plan has for
it are replaced by ours: they tell transformers how to split, and wrap nothing. Once values are loaded, the parts become
plain tensors (``cut_layers``), and the layer has a ``Shard``, which sums or gathers where necessary. A float layer
whose outputs are gathered, such as the head of most models, also avoids DTensors.

A row-parallel layer quantizes its own part of a row. If scales are found at run time, the output therefore isn't bit
for bit that of a single process; it is equally close to the float layer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as OneSplit
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F
from transformers import PreTrainedModel, __version__
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from qgemm.nn import LinearLayer, QuantExperts, QuantLayer
from qgemm.nn.blocks.binding import mark_like_class
from qgemm.nn.quant_layer import frozen
from qgemm.nn.shard import Shard, Style

WHOLE = "qgemm_whole"
"""The name of the style for what every process holds whole."""

_OURS = "qgemm"
_OURS_RE = re.compile(rf"{_OURS}_(column|row|expert)_(\d)_(.*)")
"""The style of a shard, the number of parts of which it consists, and transformers' style."""
# How a quantized layer is split for each of transformers' styles in a plan.
_LINEAR: dict[str, Style] = {
    "colwise": "column",
    "colwise_rep": "column",
    "colwise_gather_output": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
}
_EXPERTS: dict[str, Style] = {"packed_colwise": "column", "colwise": "column", "grouped_gemm": "expert"}
_GATHERED = ("colwise_rep", "colwise_gather_output")
_CLOSED = (*_GATHERED, "rowwise_rep", "rowwise_split_input")
_ROUTER, _DISPATCH = "ep_router", "ep_dispatch_experts"
_OF_EXPERTS = {"moe_tp_experts", "rowwise", "packed_rowwise", _DISPATCH}
_SUMS_GRADIENTS = "replicated_with_grad_allreduce"
# These don't split parameters.
_UNCUT = (WHOLE, _SUMS_GRADIENTS, "all_reduce", "mla_kv_a_proj", "sequence_parallel")
_WAITS = "_qgemm_waits"
NEEDS_FSDP = __version__.startswith("5.19.")
"""Whether transformers splits models by expert only with FSDP, which doesn't support quantized layers."""


def is_cut(model: PreTrainedModel) -> bool:
    """Whether ``from_pretrained`` was asked to split ``model`` among processes, by tensors or experts."""
    config = getattr(model.config, "distributed_config", None)
    if config is None:
        return False
    # Until 5.18 there is a flag for experts; from 5.19 on there is a size.
    return max(config.tp_size or 1, _expert_size(config)) > 1 or getattr(config, "enable_expert_parallel", False)


def _expert_size(config: Any) -> int:
    return getattr(config, "ep_size", None) or 1


class _Plan(dict[str, str]):
    """The plan given in a ``distributed_config``, with replaced styles; ``given`` is the unchanged original."""

    def __init__(self, given: dict[str, str]) -> None:
        super().__init__(given)
        self.given = given


def go_by(model: PreTrainedModel, config: Any) -> None:
    """Replaces the model's copy of the ``distributed_config`` by ``config``, the object that transformers uses.

    So its plans are the ones that ``plan_layers`` changes.
    """
    for name in ("tp_plan", "ep_plan"):
        plan = getattr(config, name, None)
        if isinstance(plan, dict):
            setattr(config, name, _Plan(plan.given if isinstance(plan, _Plan) else plan))
    model.config.distributed_config = config


def process_group(model: PreTrainedModel) -> Any:
    """The processes among which ``model`` is split; None if one process has the whole model."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) <= 1:
        return None
    return (mesh["tp"] if mesh.ndim > 1 else mesh).get_group()


class _Whole(TensorParallelLayer):
    """The style for what each process has whole: its ``forward`` isn't wrapped, so that it can be fused."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Does nothing."""
        return module


class _Around(TensorParallelLayer):
    """One of transformers' own styles, which wraps no quantized layer: a shard handles communication itself."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def validate_param(self, module: nn.Module, param: str, mesh: Any, parameter_name: str | None = None) -> None:
        """As in transformers."""
        self.original.validate_param(module, param, mesh, parameter_name=parameter_name)

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """As in transformers."""
        self.original.shard_param(module, param, mesh)

    def install_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Does nothing for quantized layers."""
        return module if _is_ours(module) else self.original.install_forward(module, *args, **kwargs)


class _OfQuantized(_Around):
    """The style for quantized layers; for other modules that a plan's pattern matches, transformers' own."""

    def __init__(self, style: Style, original: TensorParallelLayer, parts: int) -> None:
        super().__init__(original)
        self.style, self.parts = style, parts

    def validate_param(self, module: nn.Module, param: str, mesh: Any, parameter_name: str | None = None) -> None:
        """Does nothing for quantized layers, which are already checked."""
        if not _is_ours(module):
            self.original.validate_param(module, param, mesh, parameter_name=parameter_name)

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """Replaces a parameter that is split by a DTensor."""
        if not _is_ours(module):
            self.original.shard_param(module, param, mesh)
        elif isinstance(module, QuantLayer):
            splits = module.splits(self.style, self.parts)
            if any(each.packs_anew(mesh.size()) for each in splits.values()):
                return  # it stays whole until it has values; then cut_layers splits it
            if (split := splits.get(param)) is not None:
                dim, parts, *_ = split
                placement = OneSplit(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
                whole: Any = module._parameters[param]
                if not whole.is_meta:
                    return  # once it has values, cut_layers splits it
                module._parameters[param] = frozen(distribute_tensor(whole, mesh, [placement], src_data_rank=None))


class _Dispatched(_Around):
    """``ep_dispatch_experts`` of transformers from 5.19 on; but quantized experts find their own tokens.

    It keeps transformers' name, by which transformers recognizes expert parallelism.
    """


class _Gathered(_Around):
    """``colwise_gather_output`` for a float layer: makes no DTensor unless a gradient is needed."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """As in transformers, with a shortcut around it."""
        wrapped: nn.Module = self.original.install_forward(module, mesh)
        if type(module) is not nn.Linear:
            return wrapped
        shard, forward = _shard(mesh, "column", is_open=False), wrapped.forward

        def gathered(self: nn.Module, input: Tensor) -> Tensor:
            if torch.is_grad_enabled() or isinstance(input, DTensor):
                out: Tensor = forward(input)
                return out
            weight, bias = (_local(self._parameters.get(name)) for name in ("weight", "bias"))
            return shard.gather(F.linear(input, weight, bias))  # type: ignore[arg-type]

        wrapped.forward = MethodType(gathered, wrapped)
        return wrapped


class _GradientsSummed(_Around):
    """``replicated_with_grad_allreduce``, for norms of heads, which fused layers needn't call without gradients."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """As in transformers; 5.24 replaces ``forward`` with one that handles gradients first."""
        wrapped: nn.Module = self.original.install_forward(module, mesh)
        if (forward := vars(wrapped).get("forward")) is not None:
            mark_like_class(forward)
        return wrapped


def plan_layers(model: PreTrainedModel, layers: Mapping[str, QuantLayer], waiting: bool = False) -> None:
    """Puts our styles for quantized ``layers``, by name, into the plans of ``model``, before transformers uses these.

    ``waiting``: whether float layers are still in place, to be read whole, quantized, and only then split. Raises
    ``ValueError`` for a layer that can't be split in the style that a plan has for it.
    """
    ALL_PARALLEL_STYLES.register(WHOLE, _Whole())  # type: ignore[arg-type]
    config = model.config.distributed_config
    given = config.tp_plan
    size = getattr(config, "tp_size", None) or 1
    starred: dict[str, list[str]] = {}
    for name in layers:
        starred.setdefault(_starred(name), []).append(name)
    by_expert = _expert_plans(model)
    for plan in (*by_expert, model.tp_plan, given if isinstance(given, dict) else {}):
        for key, names in starred.items():
            # A layer with a plan for experts has no other plan.
            if plan in by_expert or not any(key in each for each in by_expert):
                _plan(plan, key, {name: layers[name] for name in names}, size, model)
        for key, style in plan.items():
            if style in _GATHERED:
                plan[key] = f"{_OURS}_gathered_{style}"
                ALL_PARALLEL_STYLES.register(plan[key], _Gathered(ALL_PARALLEL_STYLES[style]))  # type: ignore[arg-type]
    if not isinstance(known := ALL_PARALLEL_STYLES[_SUMS_GRADIENTS], _GradientsSummed):
        ALL_PARALLEL_STYLES.register(_SUMS_GRADIENTS, _GradientsSummed(known))  # type: ignore[arg-type]
    if waiting:
        for name in layers:
            vars(model.get_submodule(name))[_WAITS] = True


def _expert_plans(model: PreTrainedModel) -> list[dict[str, str]]:
    """The plans for experts, which transformers has in addition to those for tensors from 5.19 on.

    Raises ``ValueError`` if processes would have tokens of their own, and in 5.19 for whole experts.
    """
    config: Any = model.config.distributed_config
    size = _expert_size(config)
    if size == 1:
        return []
    if size != config.tp_size:
        raise ValueError(
            f"distributed_config has ep_size {size} and tp_size {config.tp_size}; quantized experts are split among "
            "processes that have the same tokens: make them equal"
        )
    of_model: dict[str, str] = model.ep_plan  # type: ignore[assignment]
    plans = [plan for plan in (of_model, config.ep_plan) if plan]
    if NEEDS_FSDP and any(_DISPATCH in plan.values() for plan in plans):
        raise ValueError(
            "transformers 5.19 puts a model that is split by expert into FSDP, which takes no quantized layers: use "
            "transformers 5.20 or later, or split experts by columns, without ep_size"
        )
    if not isinstance(known := ALL_PARALLEL_STYLES[_DISPATCH], _Dispatched):
        ALL_PARALLEL_STYLES.register(_DISPATCH, _Dispatched(known))  # type: ignore[arg-type]
    return plans


def _plan(plan: dict[str, str], key: str, layers: Mapping[str, QuantLayer], size: int, model: PreTrainedModel) -> None:
    """Replaces the styles in ``plan`` for ``layers``, which all have the key ``key`` there."""
    entries = [entry for entry in plan if entry == key or entry.rpartition(".")[0] == key]
    styles = {plan[entry] for entry in entries}
    is_experts = any(isinstance(layer, QuantExperts) for layer in layers.values())
    known = _EXPERTS if is_experts else _LINEAR
    wanted = {known[style] for style in styles if style in known}
    rest = styles - {*known, *_UNCUT} - (_OF_EXPERTS if is_experts else set())
    if styles <= {*_UNCUT} or any(_OURS_RE.match(each) for each in styles):  # ours already, if two plans are one
        return
    name, layer = next(iter(layers.items()))
    if rest or len(wanted) != 1:
        raise ValueError(_refusal(name, layer, styles, "which qgemm doesn't know for it"))
    (style,) = wanted
    parts = 2 if "packed_colwise" in styles and not is_experts else 1
    is_open = style == "column" and not is_experts and not styles & {*_CLOSED}
    for name, layer in layers.items():
        if reason := layer.why_whole(style, size, parts) or (_why_heads(model, name, layer, size) if is_open else ""):
            raise ValueError(_refusal(name, layer, styles, f"and {reason}"))
    if style == "expert":
        _plan_router(plan, key, layers, model)
    if plan.get(key) == _DISPATCH:  # it stays, and doesn't concern parameters
        entries = sorted({f"{key}.{leaf}" for one in layers.values() for leaf, _ in one.named_parameters()})
    else:
        entries = sorted({key, *entries})
    for entry in entries:
        original = plan.get(entry, WHOLE)
        plan[entry] = f"{_OURS}_{style}_{parts}_{original}"
        ALL_PARALLEL_STYLES.register(plan[entry], _OfQuantized(style, ALL_PARALLEL_STYLES[original], parts))  # type: ignore[arg-type]


def _plan_router(plan: dict[str, str], key: str, layers: Mapping[str, QuantLayer], model: PreTrainedModel) -> None:
    """Leaves a router whole in ``plan`` whose experts, ``layers``, are split by expert: they recognize their own.

    Raises ``ValueError`` if other modules with that ``key`` hold experts in float.
    """
    others = [name for name, _ in model.named_modules() if _starred(name) == key and name not in layers]
    if others:
        raise ValueError(
            f"expert parallelism would split {others[0]}, whose experts are in float, and those of {[*layers][-1]}, "
            "which are quantized: quantize the experts of all layers, or of none"
        )
    for entry in [entry for entry in plan if plan[entry] == _ROUTER]:
        if entry.rpartition(".")[0] == key.rpartition(".")[0]:
            plan[entry] = WHOLE


def _why_heads(model: PreTrainedModel, name: str, layer: QuantLayer, size: int) -> str:
    """Why the outputs of an attention layer can't be split: processes need whole heads. Empty if they can."""
    width = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if not isinstance(layer, LinearLayer) or not isinstance(width, int) or layer.out_features % width:
        return ""
    heads = layer.out_features // width
    return f"the number of its heads, {heads}, can't be divided by {size} processes" if heads % size else ""


def cut_layers(model: PreTrainedModel) -> None:
    """Turns the quantized layers of ``model``, planned by ``plan_layers``, into shards with plain parameters.

    Layers that transformers already split while reading keep their parts; whole ones are split.
    """
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    plans: tuple[dict[str, str], ...] = (getattr(model, "ep_plan", {}), model.tp_plan)
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantLayer) or layer.shard is not None:
            continue
        vars(layer).pop(_WAITS, None)
        entries = [plan.get(f"{_starred(name)}{leaf}", "") for plan in plans for leaf in ("", ".gate_up_proj")]
        found = next((match for match in map(_OURS_RE.match, entries) if match), None)
        if not found:
            continue
        style, parts, original = found.groups()
        is_open = original not in _CLOSED
        shard = _shard(mesh, style, is_open, int(parts))  # type: ignore[arg-type]
        if any(isinstance(each, DTensor) for each in layer._parameters.values()):
            for leaf, parameter in list(layer._parameters.items()):
                if isinstance(parameter, DTensor):
                    setattr(layer, leaf, frozen(parameter.detach().to_local()))
            layer.take_shard(shard)
        else:
            layer.cut(shard)


def _shard(mesh: Any, style: Style, is_open: bool, parts: int = 1) -> Shard:
    return Shard(style, mesh.get_group(), mesh.get_local_rank(), mesh.size(), is_open, parts)


def _is_ours(module: nn.Module) -> bool:
    """Whether it is quantized, or will be."""
    return isinstance(module, QuantLayer) or _WAITS in vars(module)


def _starred(name: str) -> str:
    """The name as in transformers' plans: with a star for each number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _local(parameter: Any) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _refusal(name: str, layer: QuantLayer, styles: set[str], reason: str) -> str:
    return (
        f"tensor parallelism would split {name}, a {type(layer).__name__}, in the style "
        f"{' and '.join(sorted(styles))}, {reason}: load the model without distributed_config (with a device_map, for "
        "example), or quantize it with this layer in skip"
    )
