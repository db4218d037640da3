"""``QGemmLinearMethod``: computes a linear layer of vLLM in a scheme of qgemm.

A layer has the parameters of qgemm's own layer (``qgemm.nn``), with the same names, so that files fit; the product is
one functional operator, which ``torch.compile`` and CUDA graphs handle without changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from qgemm.integrations.vllm.parameters import add_parameters, finish_parameters
from qgemm.integrations.vllm.products import product_of
from qgemm.integrations.vllm.sizes import Sizes
from qgemm.scheme import QuantScheme


@register_weight_loader_v2_supported_method
class QGemmLinearMethod(LinearMethodBase):
    """``scheme``: of the layer, or of all parts of a merged one. ``name``: of the layer, for errors."""

    def __init__(self, scheme: QuantScheme, name: str) -> None:
        """The method of one layer: vLLM requests one for each."""
        self.scheme = scheme
        self.name = name

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: Any,
        weight_loader: Callable[..., Any],
        **others: Any,
    ) -> None:
        """Adds the layer's parameters; raises ``ValueError`` for a split that the scheme doesn't allow."""
        self.sizes = Sizes(self.name, self.scheme, input_size_per_partition, input_size, tuple(output_partition_sizes))
        self.sizes.check()
        layer.logical_widths = output_partition_sizes
        add_parameters(layer, self.sizes, params_dtype, weight_loader)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Checks that everything was loaded, and chooses the product."""
        parts = finish_parameters(layer, self.sizes)
        self.product = product_of(self.scheme, self.sizes, parts)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias``, ``[..., N]`` in the dtype of ``x``."""
        return self.product(layer, x, bias)
