"""``QGemmExpertsMethod``: computes vLLM's fused experts with qgemm's operators for experts.

vLLM does the routing, and adds shared experts and the ranks' parts; here is only what each expert does to its tokens.
Parameters are those of ``QuantExperts`` under vLLM's names, ``w13`` for gates above ups and ``w2`` for down, split as
vLLM splits them. They don't come through the model's ``load_weights``, because each model's expects a different layout
of experts, but through ``load``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from qgemm.integrations.vllm.parameters import is_missing, no_scale, take_dtype
from qgemm.kernels.activations import GPT_OSS, GatedActivation
from qgemm.nn.experts import QuantExperts, compute_experts, expert_weights, split_leaf
from qgemm.nn.quant_layer import frozen
from qgemm.nn.shard import Shard
from qgemm.scheme import QuantScheme

# By vLLM's names.
_ACTIVATIONS = {**{name: GatedActivation(name) for name in ("silu", "gelu", "gelu_tanh")}, "swigluoai": GPT_OSS}
_SHORT = {"gate_up_proj": "w13", "down_proj": "w2"}


def are_experts(layer: nn.Module) -> bool:
    """Whether ``layer`` is vLLM's fused experts, whose class depends on the version."""
    return any(kind.__name__ in ("FusedMoE", "RoutedExperts") for kind in type(layer).__mro__)


def _are_adapted() -> bool:
    """Whether vLLM will have adapters for experts: it will, unless it is told which layers have some."""
    names = getattr(get_current_vllm_config().lora_config, "target_modules", None)
    return names is None or "experts" in names


class QGemmExpertsMethod(FusedMoEMethodBase):
    """``scheme``: of the experts. ``name``: of the layer, for errors; ``name_in_files``: its name in the files."""

    def __init__(self, scheme: QuantScheme, name: str, layer: Any, name_in_files: str) -> None:
        """Raises ``ValueError`` for experts that qgemm doesn't compute in vLLM."""
        super().__init__(layer.moe_config)
        self.name, self.scheme, self.name_in_files = name, scheme, name_in_files
        self.activation = self._activation_of(layer)
        if getattr(layer, "apply_router_weight_on_input", False):
            raise self._refusal("their input is weighted by the router")
        if getattr(layer.moe_config, "is_lora_enabled", False) and _are_adapted():
            raise self._refusal(
                "they have no adapters, and --enable-lora alone is for experts too: name the layers that have some "
                "with --lora-target-modules"
            )

    def _refusal(self, problem: str) -> ValueError:
        return ValueError(
            f"vLLM can't compute the experts {self.name} in {self.scheme.name!r} through qgemm: {problem}"
        )

    def _activation_of(self, layer: Any) -> GatedActivation:
        name = getattr(layer.activation, "value", layer.activation)
        if name not in _ACTIVATIONS:
            raise self._refusal(f"their activation is {name!r}; it must be one of {sorted(_ACTIVATIONS)}")
        limit = getattr(layer, "swiglu_limit", None)
        return replace(_ACTIVATIONS[name], limit=limit) if limit and name == "silu" else _ACTIVATIONS[name]

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Adds the parameters of the experts, or parts of experts, that this rank has."""
        inner, parallel = intermediate_size_per_partition, layer.moe_config.moe_parallel_config
        size, has_bias = parallel.tp_size, getattr(layer.moe_config, "has_bias", False)
        options: dict[str, Any] = {"activation": self.activation, "bias": has_bias, "scheme": self.scheme}
        whole = QuantExperts(num_experts, hidden_size, inner * size, device="meta", **options)
        self.scale_names = whole.scale_names
        problem = whole.why_whole("column", size) if size > 1 else ""
        if not problem and inner % (step := whole.linear_of("gate_up_proj").rows_in_step):
            problem = f"the {inner} gates of an expert don't end with a block of {step}"
        if problem:
            raise self._refusal(problem)
        self.shard = Shard("column", None, parallel.tp_rank, size)
        self.splits = whole.splits("column") if size > 1 else {}
        self.names: dict[str, str] = {}  # vLLM's name of each parameter
        experts = QuantExperts(num_experts, hidden_size, inner, dtype=params_dtype, **options)
        for name, parameter in experts.named_parameters():
            weight, leaf = split_leaf(name)
            if leaf in ("bias", "weight_zero_point") and parameter.is_floating_point():
                parameter.fill_(torch.nan)
            elif name in self.scale_names and parameter.dtype == torch.uint8:
                parameter.fill_(no_scale(parameter.dtype))
            self.names[name] = f"{_SHORT[weight]}_{leaf}"
            layer.register_parameter(self.names[name], parameter)

    def load(self, layer: Any, name: str, value: Tensor) -> None:
        """Loads this rank's part of ``value``, the parameter ``name`` of all experts in the files, into ``layer``.

        Raises ``ValueError`` if it doesn't fit.
        """
        if name not in self.names:
            raise self._refusal(f"the files have a {name}, which vLLM's layer hasn't")
        if layer.expert_map is not None:
            slots = layer.expert_map.to("cpu", torch.int64)
            value = value[slots.argsort()[int((slots < 0).sum()) :]]
        if (split := self.splits.get(name)) is not None:
            value = self.shard.part_of(value, split)
        elif name == "down_proj_bias" and self.shard.rank:
            value = torch.zeros_like(value)  # it is only added once
        parameter = getattr(layer, self.names[name])
        if value.shape != parameter.shape:
            raise ValueError(
                f"{self.name}.{name} is {list(value.shape)} in the files, but the layer has {list(parameter.shape)}"
            )
        take_dtype(parameter, value, f"{self.name}.{name}")
        parameter.data.copy_(value)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks that everything was loaded."""
        for name, theirs in self.names.items():
            value = getattr(layer, theirs).data
            if is_missing(value, name in self.scale_names):
                raise ValueError(f"{self.name}.{name} isn't in the files, or not all of it")
            setattr(layer, theirs, frozen(value))

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None: no kernel of vLLM's is used."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum over those of each token's experts that this rank has, ``[T, H]`` in the dtype of ``x``."""
        index = topk_ids.to(torch.int64)
        if layer.expert_map is not None:
            index = layer.expert_map.to(torch.int64)[index]  # -1 for other ranks' experts, which contribute nothing

        def stored(name: str) -> Tensor | None:
            theirs = self.names.get(name)
            return None if theirs is None else getattr(layer, theirs)

        weights = expert_weights(self.scheme, self.activation, stored)
        return compute_experts(x, index, topk_weights, weights)
