"""``QGemmExpertsMethod``: how fused experts of vLLM compute with ``torch.ops.qgemm.quant_experts``.

vLLM routes, adds shared experts and the ranks' parts; here lies what each expert does to its tokens. Files go through
vLLM's own loader, expert by expert (``names.for_vllm``), which knows of cuts and of experts on other ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.expert_weights import ExpertWeights
from qgemm.nn.kinds import linear_class
from qgemm.nn.linear import QuantLinear
from qgemm.nn.quant_layer import frozen
from qgemm.ops import quant_experts
from qgemm.scheme import QuantScheme

# By vLLM's names.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}


def are_experts(layer: nn.Module) -> bool:
    """Whether ``layer`` is vLLM's fused experts, whose class depends on the version."""
    return any(kind.__name__ in ("FusedMoE", "RoutedExperts") for kind in type(layer).__mro__)


class QGemmExpertsMethod(FusedMoEMethodBase):
    """``scheme``: of the experts. ``name``: of the layer, for errors."""

    def __init__(self, scheme: QuantScheme, name: str, layer: Any) -> None:
        """Raises ``ValueError`` for experts that qgemm doesn't compute in vLLM."""
        super().__init__(layer.moe_config)
        self.name, self.scheme = name, scheme
        problem = ""
        if linear_class(scheme) is not QuantLinear:
            problem = f"the scheme {scheme.name!r}"
        elif getattr(layer.moe_config, "has_bias", False):
            problem = "biases"
        if problem:
            raise ValueError(f"vLLM can't compute the experts {name} with {problem} through qgemm: use int8 or fp8")

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Adds gates above ups, ``w13_weight [E, 2I, H]``, ``w2_weight [E, H, I]`` and a scale for each row."""
        inner, storage = intermediate_size_per_partition, self.scheme.weight.format.storage
        for name, rows, columns in (("w13", 2 * inner, hidden_size), ("w2", hidden_size, inner)):
            weight = frozen(torch.empty(num_experts, rows, columns, dtype=storage))
            scale = frozen(torch.full((num_experts, rows, 1), torch.nan, dtype=torch.float32))
            layer.register_parameter(f"{name}_weight", weight)
            layer.register_parameter(f"{name}_weight_scale", scale)
            set_weight_attrs(weight, attributes)
            set_weight_attrs(scale, {**attributes, "quant_method": "channel"})

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks that everything has been loaded, and what lies between the products."""
        for name in ("w13_weight_scale", "w2_weight_scale"):
            scale = getattr(layer, name).data
            if bool(scale.isnan().any()):
                raise ValueError(f"{self.name}: {name} isn't in the files, or not all of it")
            setattr(layer, name, frozen(scale.squeeze(-1).contiguous()))
        for name in ("w13_weight", "w2_weight"):
            setattr(layer, name, frozen(getattr(layer, name).data))
        activation = getattr(layer.activation, "value", layer.activation)
        if activation not in _ACTIVATIONS or getattr(layer, "apply_router_weight_on_input", False):
            raise ValueError(
                f"vLLM can't compute the experts {self.name} through qgemm: their activation is {activation!r}, or "
                f"their input is weighted; it has {sorted(_ACTIVATIONS)}"
            )
        self.activation = GatedActivation(_ACTIVATIONS[activation])

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of vLLM's is used."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each token's experts that are here, ``[T, H]`` in the dtype of ``x``."""
        index = topk_ids.to(torch.int64)
        if layer.expert_map is not None:
            index = layer.expert_map.to(torch.int64)[index]  # -1 for those of other ranks, which contribute nothing
        tensors = layer.w13_weight, layer.w13_weight_scale, None, layer.w2_weight, layer.w2_weight_scale, None
        return quant_experts(x, index, topk_weights, ExpertWeights(*tensors, self.activation))
