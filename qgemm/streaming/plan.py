"""Everything that can be known of the quantized checkpoint before a value is read: its tensors, files, sizes.

The model is quantized on meta by ``quantize_model`` itself, so that its decisions are the ones taken here, and the
files are laid out as ``save_quantized`` does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qgemm.checkpoint.layout import parse_size, split_into_shards
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.save import text_files
from qgemm.checkpoint.tensors import find_ties, split_name, stored_tensors
from qgemm.nn import QuantLinear
from qgemm.quantize import Pattern, quantize_model
from qgemm.reporting import QuantReport, report
from qgemm.scheme import QuantScheme
from qgemm.streaming.float_tensors import BuiltFloat, FloatTensor
from qgemm.streaming.loading import plan_loading
from qgemm.streaming.source import Source


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer that is to be quantized: its name, its float weight, and whether that is stored as ``[K, N]``."""

    name: str
    weight: FloatTensor
    is_transposed: bool


@dataclass(frozen=True)
class Plan:
    """The checkpoint to be written.

    - ``model``: the quantized model, on meta.
    - ``tensors``: what the files hold, by name; values only where they aren't on meta.
    - ``shards``: the names of the tensors in each file.
    - ``layers``: of the tensors that are an int8 weight or its scales, the layer.
    - ``copied``: of all others, where their values come from.
    - ``left_out``: tensors of the source that the model doesn't have.
    """

    model: nn.Module
    tensors: dict[str, Tensor]
    ties: dict[str, str]
    shards: dict[str, list[str]]
    layers: dict[str, QuantizedLayer]
    copied: dict[str, FloatTensor]
    left_out: list[str]

    def report(self, errors: Mapping[str, float]) -> QuantReport:
        """The report on the model; ``errors``: of the weights of the quantized layers, by the layers' names."""
        records = (replace(record, weight_error=errors.get(record.name)) for record in report(self.model).records)
        return QuantReport(tuple(records))

    def text_files(self, errors: Mapping[str, float]) -> dict[str, bytes]:
        """The JSON files of the checkpoint, by name."""
        modules = self.model.named_modules(remove_duplicate=False)
        schemes = {name: module.scheme for name, module in modules if isinstance(module, QuantLinear)}
        manifest = Manifest(schemes, self.ties, self.report(errors).to_dict())
        return text_files(self.model, manifest.to_dict(), self.tensors, self.shards)


def make_plan(
    source: Source,
    scheme: str | QuantScheme,
    skip: Pattern | Iterable[Pattern] | None,
    input_scales: Mapping[str, float | Tensor] | None,
    drop: Iterable[str],
    max_shard_size: int | str,
) -> Plan:
    """What is to be written of ``source``; raises as ``quantize_model`` and ``plan_loading`` do."""
    limit = parse_size(max_shard_size)
    loading = plan_loading(source, drop)
    model = copy.deepcopy(loading.model)
    quantize_model(model, scheme, skip=skip, input_scales=input_scales, progress=False)
    tensors = stored_tensors(model)
    ties = find_ties(tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ties}
    # Under whichever of its names a tied tensor is in the files.
    floats = {id(loading.model.get_parameter_or_buffer(name)): float for name, float in loading.tensors.items()}  # type: ignore[operator]
    layers: dict[str, QuantizedLayer] = {}
    copied: dict[str, FloatTensor] = {}
    for name in tensors:
        owner, leaf = split_name(name)
        quantized = model.get_submodule(owner)
        if isinstance(quantized, QuantLinear) and leaf == "input_scale":
            copied[name] = BuiltFloat(_input_scale(model, quantized, input_scales or {}))
            continue
        is_weight = isinstance(quantized, QuantLinear) and leaf in ("weight", "weight_scale")
        float_module = loading.model.get_submodule(owner)
        found = floats[id(getattr(float_module, "weight" if is_weight else leaf))]
        if is_weight:
            layers[name] = QuantizedLayer(owner, found, type(float_module).__name__ == "Conv1D")
        else:
            copied[name] = found
    shards = split_into_shards({name: tensor.nbytes for name, tensor in tensors.items()}, limit)
    return Plan(model, tensors, ties, shards, layers, copied, loading.left_out)


def _input_scale(model: nn.Module, layer: QuantLinear, scales: Mapping[str, float | Tensor]) -> Tensor:
    names = (name for name, module in model.named_modules(remove_duplicate=False) if module is layer)
    scale = next(scales[name] for name in names if name in scales)
    return torch.as_tensor(scale, dtype=torch.float32, device="cpu").reshape(())
