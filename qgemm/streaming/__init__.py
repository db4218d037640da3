"""Quantizes checkpoints larger than memory: from files to files, without building the model."""

from qgemm.streaming.convert import quantize_checkpoint

__all__ = ["quantize_checkpoint"]
