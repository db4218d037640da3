"""``MethodConfig``: what vLLM asks about the method "qgemm" before it knows a model."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from qgemm.checkpoint.manifest import QUANT_METHOD


class MethodConfig(QuantizationConfig):
    """The method's name and requirements."""

    def get_name(self) -> str:
        """The name in ``config.json``."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes that qgemm's layers accept."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """As qgemm: 8.0, the first with int8 and bfloat16 products."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None besides ``config.json``."""
        return []
