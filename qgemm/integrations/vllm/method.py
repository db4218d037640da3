"""``MethodConfig``: what vLLM asks of the method "qgemm" before it knows a model."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from qgemm.checkpoint.manifest import QUANT_METHOD


class MethodConfig(QuantizationConfig):
    """Its name and what it runs on."""

    def get_name(self) -> str:
        """As in ``config.json``."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What qgemm's layers take."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """As qgemm: 8.0, the first with int8 and bfloat16 products."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None beside ``config.json``."""
        return []
