"""CUDA graphs of a model's forward: captured once for each form of inputs, replayed until the model is changed."""

from qgemm.replay.forward import fast_forward

__all__ = ["fast_forward"]
