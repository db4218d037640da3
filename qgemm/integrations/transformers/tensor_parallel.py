"""Tensor parallelism of transformers over quantized layers: which part of a layer goes to which process.

transformers cuts parameters by a plan of styles while it reads them, as DTensors, and wraps each layer's ``forward``. A
quantized layer knows itself how its parameters are cut (``QuantLayer.splits``), so the styles that a plan has for it
are replaced by ours: they say so to transformers, and wrap nothing. Once values are there, the parts become plain
tensors (``cut_layers``), and the layer has a ``Shard``, which sums or gathers where it must. A float layer whose
outputs are gathered, the head of most models, does so without DTensors too.

A row-parallel layer quantizes its own part of a row. With scales that are found at run time, the output is therefore
not that of one process bit for bit; it is as close to the float layer's.
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
from qgemm.nn.parallel import Shard, Style
from qgemm.nn.quant_layer import frozen

WHOLE = "qgemm_whole"
"""The name of the style of what every process holds whole."""

_OURS = "qgemm"
_OURS_RE = re.compile(rf"{_OURS}_(column|row|expert)_(\d)_(.*)")
"""The style of a shard, in how many parts it is cut, and transformers' style."""
# How a quantized layer is cut where a plan has transformers' style for it.
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
# These leave parameters as they are.
_UNCUT = (WHOLE, _SUMS_GRADIENTS, "all_reduce", "mla_kv_a_proj", "sequence_parallel")
_WAITS = "_qgemm_waits"
NEEDS_FSDP = __version__.startswith("5.19.")
"""Whether transformers splits models by expert with FSDP alone, which takes no quantized layers."""


def is_cut(model: PreTrainedModel) -> bool:
    """Whether ``from_pretrained`` was asked to cut ``model`` among processes, tensors or experts."""
    config = getattr(model.config, "distributed_config", None)
    if config is None:
        return False
    # Until 5.18 there is a flag for experts, and from 5.19 on a size.
    return max(config.tp_size or 1, _expert_size(config)) > 1 or getattr(config, "enable_expert_parallel", False)


def _expert_size(config: Any) -> int:
    return getattr(config, "ep_size", None) or 1


class _Plan(dict[str, str]):
    """A plan that a ``distributed_config`` was given, in which styles are replaced; ``given`` stays as it is."""

    def __init__(self, given: dict[str, str]) -> None:
        super().__init__(given)
        self.given = given


def go_by(model: PreTrainedModel, config: Any) -> None:
    """Puts ``config``, the ``distributed_config`` that transformers goes by, in the place of the model's copy of it.

    So that the plans in it are those that ``plan_layers`` changes.
    """
    for name in ("tp_plan", "ep_plan"):
        plan = getattr(config, name, None)
        if isinstance(plan, dict):
            setattr(config, name, _Plan(plan.given if isinstance(plan, _Plan) else plan))
    model.config.distributed_config = config


def process_group(model: PreTrainedModel) -> Any:
    """The processes that ``model`` is cut among; None for a model that one process has whole."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) <= 1:
        return None
    return (mesh["tp"] if mesh.ndim > 1 else mesh).get_group()


class _Whole(TensorParallelLayer):  # type: ignore[misc]
    """The style of what each process has whole: its ``forward`` stays as well, or it wouldn't be fused."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Nothing."""
        return module


class _OfQuantized(TensorParallelLayer):  # type: ignore[misc]
    """The style of quantized layers; of other modules that a plan's pattern names, transformers' own."""

    def __init__(self, style: Style, original: TensorParallelLayer, parts: int) -> None:
        self.style, self.original, self.parts = style, original, parts

    def validate_param(self, module: nn.Module, param: str, mesh: Any, parameter_name: str | None = None) -> None:
        """Quantized layers have been looked at."""
        if not _is_ours(module):
            self.original.validate_param(module, param, mesh, parameter_name=parameter_name)

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """Puts a DTensor in the place of a parameter that is cut."""
        if not _is_ours(module):
            self.original.shard_param(module, param, mesh)
        elif isinstance(module, QuantLayer):
            splits = module.splits(self.style, self.parts)
            if any(each.packs_anew(mesh.size()) for each in splits.values()):
                return  # whole until it has values, and then cut_layers cuts it
            if (split := splits.get(param)) is not None:
                dim, parts, *_ = split
                placement = OneSplit(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
                whole: Any = module._parameters[param]
                if not whole.is_meta:
                    return  # with values, cut_layers cuts it
                module._parameters[param] = frozen(distribute_tensor(whole, mesh, [placement], src_data_rank=None))

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Nothing: a shard knows what to do."""
        return module if _is_ours(module) else self.original.install_forward(module, mesh)


class _Around(TensorParallelLayer):  # type: ignore[misc]
    """One of transformers' own styles, with another ``install_forward``."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def validate_param(self, module: nn.Module, param: str, mesh: Any, parameter_name: str | None = None) -> None:
        """As transformers."""
        self.original.validate_param(module, param, mesh, parameter_name=parameter_name)

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """As transformers."""
        self.original.shard_param(module, param, mesh)


class _Dispatched(_Around):
    """``ep_dispatch_experts`` of transformers from 5.19 on, but quantized experts find their own tokens.

    It has transformers' name, by which that knows whether there is expert parallelism.
    """

    def install_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Nothing for quantized experts."""
        return module if _is_ours(module) else self.original.install_forward(module, *args, **kwargs)


class _Gathered(_Around):
    """``colwise_gather_output`` of a float layer: no DTensor is made where no gradient is asked for."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """As transformers, around a shorter way."""
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
    """``replicated_with_grad_allreduce``, of norms of heads, which fused layers needn't call without gradients."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """As transformers, of which 5.24 replaces ``forward`` with one that looks after gradients first."""
        wrapped: nn.Module = self.original.install_forward(module, mesh)
        if (forward := vars(wrapped).get("forward")) is not None:
            mark_like_class(forward)
        return wrapped


def plan_layers(model: PreTrainedModel, layers: Mapping[str, QuantLayer], waiting: bool = False) -> None:
    """Puts our styles for quantized ``layers``, by name, into the plans of ``model``, before transformers goes by them.

    ``waiting``: whether float layers are there yet, to be read whole, quantized, and only then cut. Raises
    ``ValueError`` for a layer that can't be cut in the style that a plan has for it.
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
            # A layer that there is a plan of experts for has no other.
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
    """The plans of experts beside the plans of tensors, which transformers has from 5.19 on.

    Raises ``ValueError`` if processes are to have tokens of their own, and in 5.19 for whole experts.
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
    """Replaces what ``plan`` has for ``layers``, all of which it calls ``key``."""
    entries = [entry for entry in plan if entry == key or entry.rpartition(".")[0] == key]
    styles = {plan[entry] for entry in entries}
    is_experts = any(isinstance(layer, QuantExperts) for layer in layers.values())
    known = _EXPERTS if is_experts else _LINEAR
    wanted = {known[style] for style in styles if style in known}
    rest = styles - {*known, *_UNCUT} - (_OF_EXPERTS if is_experts else set())
    if styles <= {*_UNCUT} or any(_OURS_RE.match(each) for each in styles):  # of which there may be one plan, or two
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
        others = [name for name, _ in model.named_modules() if _starred(name) == key and name not in layers]
        if others:
            raise ValueError(
                f"expert parallelism would split {others[0]}, whose experts are in float, and those of {name}, which "
                "are quantized: quantize the experts of all layers, or of none"
            )
        for entry in [entry for entry in plan if plan[entry] == _ROUTER]:
            if entry.rpartition(".")[0] == key.rpartition(".")[0]:
                plan[entry] = WHOLE  # the experts tell their own from others by the numbers that a router gives
    if plan.get(key) == _DISPATCH:  # which stays, and says nothing of parameters
        entries = sorted({f"{key}.{leaf}" for one in layers.values() for leaf, _ in one.named_parameters()})
    else:
        entries = sorted({key, *entries})
    for entry in entries:
        original = plan.get(entry, WHOLE)
        plan[entry] = f"{_OURS}_{style}_{parts}_{original}"
        ALL_PARALLEL_STYLES.register(plan[entry], _OfQuantized(style, ALL_PARALLEL_STYLES[original], parts))  # type: ignore[arg-type]


def _why_heads(model: PreTrainedModel, name: str, layer: QuantLayer, size: int) -> str:
    """Why the outputs of a layer of attention can't be cut: processes have whole heads. Empty if they can."""
    width = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if not isinstance(layer, LinearLayer) or not isinstance(width, int) or layer.out_features % width:
        return ""
    heads = layer.out_features // width
    return f"the number of its heads, {heads}, can't be divided by {size} processes" if heads % size else ""


def cut_layers(model: PreTrainedModel) -> None:
    """Makes the quantized layers of ``model``, whose plans ``plan_layers`` has made, shards with plain parameters.

    Those that transformers has cut already, as it read them, keep their parts; whole ones are cut.
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


def _shard(mesh: Any, style: Style, is_open: bool = True, parts: int = 1) -> Shard:
    return Shard(style, mesh.get_group(), mesh.get_local_rank(), mesh.size(), is_open, parts)


def _is_ours(module: nn.Module) -> bool:
    """Whether it is quantized, or will be."""
    return isinstance(module, QuantLayer) or _WAITS in vars(module)


def _starred(name: str) -> str:
    """As transformers looks layers up: with a star for a number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _local(parameter: Any) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _refusal(name: str, layer: QuantLayer, styles: set[str], reason: str) -> str:
    return (
        f"tensor parallelism would split {name}, a {type(layer).__name__}, in the style "
        f"{' and '.join(sorted(styles))}, {reason}: load the model without distributed_config (with a device_map, for "
        "example), or quantize it with this layer in skip"
    )
