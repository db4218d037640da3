"""Quantized matrix products. ``qgemm.kernels.stages`` has the device-side blocks that they are made of."""

from qgemm.kernels.activations import GPT_OSS, GatedActivation
from qgemm.kernels.dispatch import decode_attention, experts, grouped_mm, int_mm, matmul, quantize_rows, scaled_mm
from qgemm.kernels.gemm.config import GemmConfig, select_config

__all__ = [
    "GPT_OSS",
    "GatedActivation",
    "GemmConfig",
    "decode_attention",
    "experts",
    "grouped_mm",
    "int_mm",
    "matmul",
    "quantize_rows",
    "scaled_mm",
    "select_config",
]
