"""Tensor parallelism of transformers over ``QuantLinear``: which part of a layer goes to which process.

A layer that is cut by output channels (``colwise``) has its weight, scales and bias cut alike, which transformers does
by itself. One that is cut along K (``rowwise``) multiplies its part of the input by its part of the weight, and the
products are added up: its scales, one an output channel, are needed whole everywhere. So is ``input_scale``, a number.

Layers of other classes (packed, rotated, with a zero point or columns in float) are refused, and so are experts.

In a ``rowwise`` layer each process quantizes its own part of a row. With scales that are found at run time, the output
is therefore not that of one process bit for bit; it is as close to the float layer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from qgemm.nn import QuantLinear

WHOLE = "qgemm_whole"
"""The name of the style of a parameter that every process holds whole. transformers has none for a cut layer's."""

_BY_CHANNEL = ("colwise", "colwise_rep", "colwise_gather_output")
_ALONG_K = ("rowwise", "rowwise_rep", "rowwise_split_input")
# These leave parameters as they are.
_UNCUT = ("replicated_with_grad_allreduce", "all_reduce", "mla_kv_a_proj", "sequence_parallel")


def is_cut(model: PreTrainedModel) -> bool:
    """Whether ``from_pretrained`` was asked to cut ``model`` among processes, tensors or experts."""
    config = getattr(model.config, "distributed_config", None)
    return config is not None and (config.tp_size > 1 or bool(config.enable_expert_parallel))


def plan_layers(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> None:
    """Completes the plans of ``model`` for its quantized ``layers``, by name, before transformers goes by them.

    Raises ``ValueError`` for a layer that would be cut in a way in which its scales don't follow.
    """
    ALL_PARALLEL_STYLES.register(WHOLE, TensorParallelLayer())  # type: ignore[arg-type]
    given = model.config.distributed_config.tp_plan
    for plan in (model.tp_plan, given if isinstance(given, dict) else {}):
        for name, layer in layers.items():
            # As transformers looks them up: with a star for a layer's number.
            key = re.sub(r"\.\d+(?=\.|$)", ".*", name)
            parameters = [leaf for leaf, _ in layer.named_parameters(recurse=False)]
            styles = {plan[entry] for entry in (key, *(f"{key}.{leaf}" for leaf in parameters)) if entry in plan}
            unknown = styles - {*_BY_CHANNEL, *_ALONG_K, *_UNCUT, WHOLE}
            if unknown or (styles and type(layer) is not QuantLinear):
                raise ValueError(
                    f"tensor parallelism would split {name}, a {type(layer).__name__}, in the style "
                    f"{' and '.join(sorted(styles))}, which doesn't split its scales: load the model without "
                    "distributed_config (with a device_map, for example), or quantize it with this layer in skip"
                )
            # Its kernels take tensors, not DTensors.
            layer._hf_quantized_needs_local_tp = True  # type: ignore[assignment]
            if "input_scale" in parameters and styles & {*_BY_CHANNEL, *_ALONG_K}:
                plan[f"{key}.input_scale"] = WHOLE
            if styles & {*_ALONG_K}:
                plan[f"{key}.weight_scale"] = WHOLE
