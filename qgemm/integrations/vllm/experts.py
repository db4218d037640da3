"""``QGemmExpertsMethod``: how fused experts of vLLM compute with qgemm's operators for experts.

vLLM routes, adds shared experts and the ranks' parts; here lies what each expert does to its tokens. Parameters are
those of ``QuantExperts`` under vLLM's names, ``w13`` for gates above ups and ``w2`` for down. vLLM gives them what the
files have expert by expert (``names.for_vllm``); cuts are those of ``QuantExperts``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from qgemm.integrations.vllm.parameters import is_missing, no_scale, take_dtype
from qgemm.kernels.activations import GatedActivation
from qgemm.nn.experts import QuantExperts, compute_experts, expert_weights, split_leaf
from qgemm.nn.parallel import Shard, Split
from qgemm.nn.quant_layer import frozen
from qgemm.scheme import QuantScheme

# By vLLM's names.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
_SHORT = {"gate_up_proj": "w13", "down_proj": "w2"}


def are_experts(layer: nn.Module) -> bool:
    """Whether ``layer`` is vLLM's fused experts, whose class depends on the version."""
    return any(kind.__name__ in ("FusedMoE", "RoutedExperts") for kind in type(layer).__mro__)


class QGemmExpertsMethod(FusedMoEMethodBase):
    """``scheme``: of the experts. ``name``: of the layer, for errors."""

    def __init__(self, scheme: QuantScheme, name: str, layer: Any) -> None:
        """Raises ``ValueError`` for experts that qgemm doesn't compute in vLLM."""
        super().__init__(layer.moe_config)
        self.name, self.scheme = name, scheme
        if getattr(layer.moe_config, "has_bias", False):
            raise self._refusal("they have biases")

    def _refusal(self, problem: str) -> ValueError:
        return ValueError(
            f"vLLM can't compute the experts {self.name} in {self.scheme.name!r} through qgemm: {problem}"
        )

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Adds the parameters of the experts, or of the parts of them, that are here."""
        inner, parallel = intermediate_size_per_partition, layer.moe_config.moe_parallel_config
        size = parallel.tp_size
        sizes = num_experts, hidden_size, inner * size
        self.names: dict[str, str] = {}  # what vLLM calls each parameter
        whole = QuantExperts(*sizes, device="meta", scheme=self.scheme)
        self.scale_names = whole.scale_names
        problem = whole.why_whole("column", size) if size > 1 else ""
        if not problem and inner % (step := whole.linear_of("gate_up_proj").rows_in_step):
            problem = f"the {inner} gates of an expert don't end with a block of {step}"
        if problem:
            raise self._refusal(problem)
        shard, splits = Shard("column", None, parallel.tp_rank, size), whole.splits("column")
        experts = QuantExperts(num_experts, hidden_size, inner, scheme=self.scheme)
        for name, parameter in experts.named_parameters():
            weight, leaf = split_leaf(name)
            if name in self.scale_names and parameter.dtype == torch.uint8:
                parameter.fill_(no_scale(parameter.dtype))
            self.names[name] = f"{_SHORT[weight]}_{leaf}"
            layer.register_parameter(self.names[name], parameter)
            set_weight_attrs(parameter, {"weight_loader": self._loader(layer, name, shard, splits.get(name))})

    def _loader(self, layer: Any, name: str, shard: Shard, split: Split | None) -> Callable[..., bool | None]:
        """What vLLM calls for each expert's value of the parameter ``name``, which is cut as ``split`` says."""
        # Of one expert, and of gates or ups.
        own = None if split is None else Split(0) if split.parts > 1 else split._replace(dim=split.dim - 1)

        def load(
            param: Any,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            expert = expert_id if layer.expert_map is None else int(layer.expert_map[expert_id])
            if expert >= 0:
                take_dtype(param, loaded_weight, weight_name)
                place = param.data[expert]
                if split is not None and split.parts > 1:
                    place = place.chunk(split.parts)[("w1", "w3").index(shard_id)]
                value = loaded_weight if own is None else shard.part_of(loaded_weight, own)
                if value.shape != place.shape:
                    raise ValueError(
                        f"{self.name}: {name} of expert {expert_id} is {list(value.shape)} in the files, but the layer "
                        f"has {list(place.shape)}"
                    )
                place.copy_(value)
            return expert >= 0 if return_success else None

        return load

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks that everything has been loaded, and what lies between the products."""
        for name, theirs in self.names.items():
            value = getattr(layer, theirs).data
            if is_missing(value, name in self.scale_names):
                raise ValueError(f"{self.name}.{name} isn't in the files, or not all of it")
            setattr(layer, theirs, frozen(value))
        activation = getattr(layer.activation, "value", layer.activation)
        if activation not in _ACTIVATIONS:
            raise self._refusal(f"their activation is {activation!r}; it must be one of {sorted(_ACTIVATIONS)}")
        if getattr(layer, "apply_router_weight_on_input", False):
            raise self._refusal("their input is weighted by the router")
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

        def stored(name: str) -> Tensor | None:
            theirs = self.names.get(name)
            return None if theirs is None else getattr(layer, theirs)

        weights = expert_weights(self.scheme, self.activation, stored)
        return compute_experts(x, index, topk_weights, weights)
