"""Quantized models as safetensors files: ``save_quantized`` and ``load_quantized``."""

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.load import load_quantized
from qgemm.checkpoint.save import save_quantized

__all__ = ["CheckpointError", "load_quantized", "save_quantized"]
