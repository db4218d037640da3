"""The method "qgemm" in an unsupported version of vLLM: only raises an error for models that request it."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config

from qgemm.checkpoint.manifest import QUANT_METHOD
from qgemm.integrations.vllm.method import MethodConfig
from qgemm.integrations.vllm.versions import installed_version, problem_with


@register_quantization_config(QUANT_METHOD)
class RefusedConfig(MethodConfig):
    """Raises ``ValueError`` when it is made."""

    def __init__(self) -> None:
        """Raises ``ValueError``."""
        raise ValueError(problem_with(installed_version()))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RefusedConfig:
        """Raises ``ValueError``."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> None:
        """Not reached."""
