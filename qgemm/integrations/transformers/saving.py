"""What ``save_pretrained`` writes for a quantized model: tensors, and a config that describes the quantization."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from qgemm.checkpoint.checksum import checksum, format_checksum
from qgemm.checkpoint.layout import WEIGHTS_KEY
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.pretrained import part_configs
from qgemm.checkpoint.refusal import FUSIONS_KEY, add_refusal, drop_refusal
from qgemm.checkpoint.safetensors_file import CHECKSUMS, SAVE
from qgemm.checkpoint.stored_report import REPORT
from qgemm.checkpoint.tensors import find_ties, split_name, stored_tensors, transient_names
from qgemm.integrations.transformers.config import QGemmConfig
from qgemm.model.report import stored_report
from qgemm.nn.quant_layer import QuantLayer, quant_layers


def tensors_and_metadata(
    model: PreTrainedModel, given: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
    """What ``save_pretrained`` stores: the same tensors as ``save_quantized``. The config describes them.

    ``given``: stored instead of the model's own tensors that ``state_dict`` contains.
    """
    is_adapter = getattr(model, "_hf_peft_config_loaded", False)  # the files contain only the adapter, and no config
    metadata = {} if is_adapter else {SAVE: secrets.token_hex(8)}
    describe(model, metadata.get(SAVE))
    report = stored_report(model)
    if report is not None and not is_adapter:
        metadata[REPORT] = json.dumps(report.to_dict())
    tensors = stored_tensors(model)
    ties = find_ties(model, tensors)
    if given is not None:
        if given and not is_adapter:  # processes that don't write have nothing
            _check_given(model, given, ties)
        transient = transient_names(model)
        tensors = {**given, **{name: tensor for name, tensor in tensors.items() if name in transient}}
    if any(tensor.device.type == "meta" for tensor in tensors.values()):
        return None if given is None else dict(given), metadata  # transformers fetches offloaded weights one at a time
    if given is None and getattr(model.config, "distributed_config", None) is None:
        _check_whole(tensors)
    stored = {name: tensor.detach() for name, tensor in tensors.items() if name not in ties}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLayer) and layer.shard is not None:
            for leaf in layer.splits(layer.shard.style, layer.shard.parts):
                if f"{name}.{leaf}" in stored:
                    whole = layer.whole(leaf)
                    if layer.shard.rank == 0:  # this process writes
                        stored[f"{name}.{leaf}"] = whole.cpu()
    # Not for parts, which transformers puts together later.
    if not is_adapter and all(type(tensor) is Tensor for tensor in stored.values()):
        # Every file gets all of them, because it isn't known here which tensor goes to which file.
        sums = {name: format_checksum(checksum(tensor.contiguous())) for name, tensor in stored.items()}
        metadata[CHECKSUMS] = json.dumps(sums)
    return stored, metadata


def _check_given(model: PreTrainedModel, given: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    """Raises ``ValueError`` unless ``given`` holds what the quantized layers of ``model`` consist of."""
    for name, layer in quant_layers(model).items():
        for leaf, parameter in layer.named_parameters(prefix=name, recurse=False):
            tensor = given.get(leaf, given.get(ties.get(leaf, leaf)))
            is_right = tensor is not None and layer.accepts_dtype(split_name(leaf)[1], tensor.dtype)
            if not is_right:
                found = "isn't there" if tensor is None else f"is {tensor.dtype}"
                raise ValueError(
                    f"state_dict: {leaf} {found}; a quantized layer's is {parameter.dtype}: pass all tensors of "
                    "model.state_dict(), with its names and dtypes"
                )


def _check_whole(tensors: Mapping[str, Tensor]) -> None:
    """Raises ``ValueError`` for a tensor of which each process has a part, by other means than transformers' own."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} is sharded among processes: gather the tensors in all of them, and pass them to "
                "save_pretrained, as state_dict=get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True, cpu_offload=True)) of torch.distributed.checkpoint.state_dict"
            )


def describe(model: PreTrainedModel, save: str | None) -> None:
    """Describes in the config of ``model`` what is quantized in it now, and which save contains its values."""
    layers = quant_layers(model)
    tensors = stored_tensors(model)
    ties = find_ties(model, tensors)
    ties.update(  # for offloaded tensors, which have no address
        (alias, name)
        for alias, name in model.all_tied_weights_keys.items()
        if alias in tensors and name in tensors and tensors[alias].device.type == "meta"
    )
    config = QGemmConfig.from_manifest(Manifest.of(layers, ties, save))
    model.config.quantization_config = config
    parts = part_configs(model).values()
    for part in parts:
        vars(part).pop("quantization_config", None)  # from a part that was quantized separately
    for each in (model.config, *parts):
        each.fusion_config = add_refusal(getattr(each, FUSIONS_KEY, None))
    vars(model.config).pop(WEIGHTS_KEY, None)  # from the folder that it was loaded from
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.quantization_config = config
    # Tensors are stored under the model's own names. The original checkpoint's names may stand for parts of a fused
    # weight, and no conversion could split an int8 weight together with its scales.
    model._weight_conversions = []  # type: ignore[assignment]
    # All keys are saved, because load_quantized builds a model without values, and so without computed tensors.
    model._keys_to_ignore_on_save = None


def admit(config: PreTrainedConfig) -> None:
    """Removes from ``config`` and its parts the entry that makes transformers refuse the checkpoint without qgemm."""
    if (fusions := drop_refusal(vars(config).pop(FUSIONS_KEY, None))) is not None:
        config.fusion_config = fusions
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            admit(part)
