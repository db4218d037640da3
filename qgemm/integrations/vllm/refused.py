"""The method "qgemm" in a version of vLLM that isn't supported: it only says so, of models that ask for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from qgemm.checkpoint.manifest import QUANT_METHOD
from qgemm.integrations.vllm.versions import installed_version, problem_with


@register_quantization_config(QUANT_METHOD)
class RefusedConfig(QuantizationConfig):
    """Raises ``ValueError`` when it is made."""

    def __init__(self) -> None:
        """Raises ``ValueError``."""
        raise ValueError(problem_with(installed_version()))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RefusedConfig:
        """Raises ``ValueError``."""
        return cls()

    def get_name(self) -> str:
        """The method's name."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Any."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> None:
        """Not reached."""
