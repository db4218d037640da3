"""``ServedConfig``: vLLM's interface to a quantization: which layers are quantized, and how each one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from qgemm.checkpoint.compressed_tensors_groups import QUANT_METHOD as COMPRESSED_TENSORS
from qgemm.checkpoint.manifest import QUANT_METHOD, Manifest
from qgemm.integrations.vllm.compiling import extend_compiler
from qgemm.integrations.vllm.experts import QGemmExpertsMethod, are_experts
from qgemm.integrations.vllm.linear import QGemmLinearMethod
from qgemm.integrations.vllm.loading import extend_loader
from qgemm.integrations.vllm.method import MethodConfig
from qgemm.integrations.vllm.names import key_of, scheme_of
from qgemm.scheme import QuantScheme


@register_quantization_config(QUANT_METHOD)
class ServedConfig(MethodConfig):
    """``layers``: the scheme of each quantized layer, by the name that vLLM has for it before merging."""

    def __init__(self, layers: dict[str, QuantScheme] | None = None) -> None:
        """Raises ``ValueError`` without ``layers``: vLLM calls it so if ``config.json`` has no quantization."""
        super().__init__()
        if layers is None:
            raise ValueError(
                "quantization is 'qgemm', but the model is in float: quantize it first, with "
                "qgemm quantize SOURCE DESTINATION, and serve DESTINATION"
            )
        self.layers = layers
        self.names_in_files = {name: name for name in layers}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """The config for ``quantization_config`` in ``config.json``; raises ``CheckpointError`` if that is invalid."""
        if config.get("quant_method") == COMPRESSED_TENSORS:
            from qgemm.integrations.vllm.compressed_tensors import QGemmCompressedTensorsConfig

            return QGemmCompressedTensorsConfig.from_config(config)
        return cls(Manifest.from_config({"quantization_config": config}, Path("config.json")).layers)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Selects this method for a checkpoint of compressed-tensors, if the user asks for it."""
        is_theirs = isinstance(hf_quant_cfg, dict) and hf_quant_cfg.get("quant_method") == COMPRESSED_TENSORS
        return QUANT_METHOD if is_theirs and user_quant == QUANT_METHOD else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames ``layers`` as the model renames the tensors of its files."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)
        self.names_in_files = hf_to_vllm_mapper.apply_dict(self.names_in_files)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """How the layer ``prefix`` computes; None for unquantized layers, such as embeddings and caches.

        Raises ``ValueError`` for a merged layer whose parts have different schemes, and for a layer that isn't linear.
        """
        extend_loader()
        extend_compiler()
        scheme = scheme_of(prefix, self.layers, self.packed_modules_mapping)
        if scheme is not None and are_experts(layer):
            return QGemmExpertsMethod(scheme, prefix, layer, self.names_in_files[key_of(prefix, self.layers)])
        if not isinstance(layer, LinearBase | ParallelLMHead):
            if scheme is not None:
                raise ValueError(
                    f"{prefix} is quantized, but it is a {type(layer).__name__} in vLLM, where qgemm computes linear "
                    "layers and experts only: leave it in float (skip)"
                )
            return None
        if scheme is not None:
            return QGemmLinearMethod(scheme, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
