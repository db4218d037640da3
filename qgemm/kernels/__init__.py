"""Quantized matrix products. ``qgemm.kernels.stages`` has the device-side blocks that they are made of."""

from qgemm.kernels.config import GemmConfig, select_config
from qgemm.kernels.dispatch import experts, grouped_mm, int_mm, matmul, quantize_rows, scaled_mm
from qgemm.kernels.gated_activation import GPT_OSS, GatedActivation

__all__ = [
    "GPT_OSS",
    "GatedActivation",
    "GemmConfig",
    "experts",
    "grouped_mm",
    "int_mm",
    "matmul",
    "quantize_rows",
    "scaled_mm",
    "select_config",
]
