"""Everything about the quantized checkpoint that can be known before a value is read: its tensors, files and sizes.

``quantize_model`` itself quantizes the model on meta, so the decisions are the same, and the files are laid out as in
``save_quantized``.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.calibration.quantization import Quantization
from qgemm.calibration.result import Calibration
from qgemm.checkpoint.layout import parse_size, split_into_shards
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.save import Save
from qgemm.checkpoint.tensors import find_ties, split_name, stored_tensors
from qgemm.model.report import QuantReport, report
from qgemm.nn import LinearLayer, QuantExperts
from qgemm.nn.attention import opened_attention
from qgemm.nn.experts import split_leaf
from qgemm.nn.float_experts import describe_experts
from qgemm.nn.linear_layer import InputScale, is_conv1d
from qgemm.nn.quant_layer import quant_layers
from qgemm.quantize import quantize
from qgemm.streaming.float_tensors import FloatTensor, built_float, ordered_experts
from qgemm.streaming.loading import plan_loading
from qgemm.streaming.shard_plan import FloatWeight, ShardPlan
from qgemm.streaming.source import Source
from qgemm.version import __version__


@dataclass(frozen=True)
class CheckpointPlan:
    """The checkpoint to be written.

    - ``model``: the quantized model, on meta.
    - ``tensors``: the tensors in the files, by name; only those not on meta have values.
    - ``shards``: the names of the tensors in each file.
    - ``weights``: for tensors that are a quantized weight or its scales, the weight.
    - ``copied``: for all others, the source of their values.
    - ``input_scales``: for static layers, rounded to float32, by the tensors' names.
    """

    model: nn.Module
    tensors: dict[str, Tensor]
    ties: dict[str, str]
    shards: dict[str, list[str]]
    weights: dict[str, FloatWeight]
    copied: dict[str, FloatTensor]
    input_scales: dict[str, float]

    def shard(self, file_name: str) -> ShardPlan:
        """The contents of one of the files."""
        names = self.shards[file_name]
        weights = {each.name: each for name in names if (each := self.weights.get(name)) is not None}
        copied = {name: self.copied[name] for name in names if name in self.copied}
        return ShardPlan({name: self.tensors[name] for name in names}, list(weights.values()), copied)

    @cached_property
    def bytes_to_read(self) -> dict[str, int]:
        """The number of bytes of float values that each file is made from."""
        return {file_name: self.shard(file_name).bytes_to_read for file_name in self.shards}

    def report(self, errors: Mapping[str, float]) -> QuantReport:
        """The model's report; ``errors``: those of the quantized weights, by name."""
        of_layers: dict[str, float] = {}
        for name, error in errors.items():
            layer = self.weights[name].layer
            of_layers[layer] = max(error, of_layers.get(layer, 0.0))
        records = (replace(record, weight_error=of_layers.get(record.name)) for record in report(self.model).records)
        return QuantReport(tuple(records))

    def text_files(self, errors: Mapping[str, float], save: Save) -> dict[str, bytes]:
        """The JSON files of the checkpoint, by name."""
        save.report = self.report(errors)
        manifest = Manifest.of(quant_layers(self.model), self.ties)
        return save.text_files(self.model, manifest.to_dict(), self.tensors, self.shards)


def plan_checkpoint(
    source: Source,
    wanted: Quantization,
    drop: Iterable[str],
    max_shard_size: int | str,
    calibration: Calibration | None = None,
) -> CheckpointPlan:
    """Plans what to write for ``source``; raises as ``quantize_model`` and ``plan_loading`` do."""
    limit = parse_size(max_shard_size)
    wanted.check_folds_no_bias("from files to files: load the float model, and pass it to qgemm.quantize_model")
    loading = plan_loading(source, drop)
    model = copy.deepcopy(loading.model)
    quantize(model, wanted, calibration=calibration, progress=False)
    tensors = stored_tensors(model)
    ties = find_ties(model, tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ties}
    # A tied tensor may be in the files under any of its names.
    floats = {id(loading.model.get_parameter_or_buffer(name)): float for name, float in loading.tensors.items()}  # type: ignore[operator]
    weights: dict[str, FloatWeight] = {}
    copied: dict[str, FloatTensor] = {}
    scales: dict[str, float] = {}
    with opened_attention(loading.model, quant_layers(model)):
        for name in tensors:
            owner, leaf = split_name(name)
            quantized = model.get_submodule(owner)
            if isinstance(quantized, LinearLayer) and leaf == "input_scale":
                scale = _input_scale(model, quantized, wanted.input_scales or {}, calibration)
                copied[name], scales[name] = built_float(scale), scale.item()
                continue
            found = _made_of(name, quantized, loading.model.get_submodule(owner), floats)
            if isinstance(found, FloatWeight):
                weights[name] = found
            else:
                copied[name] = found
    shards = split_into_shards({name: tensor.nbytes for name, tensor in tensors.items()}, limit)
    return CheckpointPlan(model, tensors, ties, shards, weights, copied, scales)


def most_files(source: Source, max_shard_size: int | str) -> int:
    """An upper bound of the number of files that ``source`` becomes, without a plan."""
    total = sum(tensor.nbytes for tensor in source.tensors.values())
    # The tensors of two consecutive files together exceed the size of one file.
    return 2 * total // parse_size(max_shard_size) + 1


def describe_job(
    source: Source, plan: CheckpointPlan, wanted: Quantization, max_shard_size: int | str, has_calibration: bool
) -> dict[str, Any]:
    """Identifies ``plan`` and ``source``, JSON-ready: a run for which all of this is equal writes the same bytes.

    A later run recognizes its work by this.
    """
    import transformers

    layout = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in plan.tensors.items()}
    return {
        **source.fingerprints,
        **wanted.to_dict(),
        **({"input_scales": plan.input_scales} if has_calibration else {}),
        "max_shard_size": parse_size(max_shard_size),
        "layout": hashlib.sha256(json.dumps([layout, plan.shards]).encode()).hexdigest(),
        "versions": {"qgemm": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def _made_of(
    name: str, quantized: nn.Module, float_module: nn.Module, floats: Mapping[int, FloatTensor]
) -> FloatWeight | FloatTensor:
    """What the tensor ``name`` of a quantized model is made from: a weight to quantize, or an unchanged float tensor.

    It belongs to ``quantized``, which replaces ``float_module``. ``floats``: by the ``id`` of each tensor of the float
    model.
    """
    owner, leaf = split_name(name)
    if isinstance(quantized, QuantExperts):
        is_bias = leaf.endswith("_bias")
        own = leaf if is_bias else split_leaf(leaf)[0]
        layout = describe_experts(float_module)
        values = ordered_experts(floats[id(float_module.get_parameter(layout.parameters[own]))], own, layout)
        if is_bias:
            return values
        linear = quantized.linear_of(own)
        names = {each: own + each.removeprefix("weight") for each in linear.row_names + linear.whole_names}
    elif isinstance(quantized, LinearLayer) and leaf in quantized.row_names + quantized.whole_names:
        own, linear = "weight", quantized
        values = floats[id(float_module.weight)]
        names = {each: each for each in linear.row_names + linear.whole_names}
    else:
        return floats[id(getattr(float_module, leaf))]
    parameters = {each: f"{owner}.{stored}" for each, stored in names.items()}
    sizes = linear.in_features, linear.out_features
    return FloatWeight(f"{owner}.{own}", owner, linear.scheme.name, *sizes, parameters, values, is_conv1d(float_module))


def _input_scale(
    model: nn.Module, layer: LinearLayer, scales: Mapping[str, InputScale], calibration: Calibration | None
) -> Tensor:
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is layer]
    scale: Any
    if calibration is None:
        scale = next(scales[name] for name in names if name in scales)
    else:
        seen = calibration.statistics
        scale = next(seen[name] for name in names if name in seen).input_scale(layer.scheme)
    return torch.as_tensor(scale, dtype=torch.float32, device="cpu").reshape(())
