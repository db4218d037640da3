"""Quantized matrix products. ``qgemm.kernels.stages`` has the device-side blocks that they are made of."""

from qgemm.kernels.config import GemmConfig, select_config
from qgemm.kernels.dispatch import int_mm, matmul, quantize_rows, scaled_mm

__all__ = ["GemmConfig", "int_mm", "matmul", "quantize_rows", "scaled_mm", "select_config"]
