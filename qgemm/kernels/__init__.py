"""Quantized matrix products. ``qgemm.kernels.stages`` has the device-side blocks that they are made of."""

from qgemm.kernels.activations import GPT_OSS, GatedActivation
from qgemm.kernels.attention.dispatch import decode_attention, paged_attention, store_in_pages
from qgemm.kernels.cpu import has_int8_products
from qgemm.kernels.dispatch import (
    activate,
    activation_quantize,
    add_norm,
    add_norm_quantize,
    experts,
    grouped_mm,
    int_mm,
    matmul,
    norm_quantize,
    post_norm,
    post_norm_quantize,
    quantize_rows,
    route,
    scaled_mm,
)
from qgemm.kernels.gemm.config import GemmConfig, select_config
from qgemm.kernels.norms import Norm
from qgemm.kernels.routing import Routing

__all__ = [
    "GPT_OSS",
    "GatedActivation",
    "GemmConfig",
    "Norm",
    "Routing",
    "activate",
    "activation_quantize",
    "add_norm",
    "add_norm_quantize",
    "decode_attention",
    "experts",
    "grouped_mm",
    "has_int8_products",
    "int_mm",
    "matmul",
    "norm_quantize",
    "paged_attention",
    "post_norm",
    "post_norm_quantize",
    "quantize_rows",
    "route",
    "scaled_mm",
    "select_config",
    "store_in_pages",
]
