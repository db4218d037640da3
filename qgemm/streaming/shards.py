"""Writes the tensors of one file, each read, quantized and written a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_writer import SafetensorsWriter
from qgemm.kernels import quantize_rows
from qgemm.quantize import WeightError
from qgemm.streaming.float_tensors import FloatTensor
from qgemm.streaming.plan import Plan, QuantizedLayer

_BYTES_AT_A_TIME = 16 << 20


def write_shard(
    file: BinaryIO, plan: Plan, names: list[str], device: torch.device, done: Callable[[int], object]
) -> dict[str, float]:
    """Writes the tensors called ``names`` to ``file``; returns the errors of the weights among them, by layer.

    ``done`` is told the bytes of float values that were dealt with. Raises ``ValueError`` for a weight that holds NaN
    or Inf, naming the layer.
    """
    errors: dict[str, float] = {}
    writer = SafetensorsWriter(file, {name: plan.tensors[name] for name in names})
    in_shard = set(names)
    for name in names:
        layer = plan.layers.get(name)
        if layer is None:
            for piece in _pieces(plan.copied[name]):
                writer.write(name, piece)
                done(piece.nbytes)
        elif layer.name not in errors:
            error = WeightError()
            weight_name, scale_name = f"{layer.name}.weight", f"{layer.name}.weight_scale"
            for q, scale in _quantized_pieces(layer, device, error, done):
                if weight_name in in_shard:
                    writer.write(weight_name, q)
                if scale_name in in_shard:
                    writer.write(scale_name, scale)
            errors[layer.name] = error.value
    writer.finish()
    return errors


def bytes_to_read(plan: Plan, names: list[str]) -> int:
    """The bytes of float values that ``write_shard`` deals with for these tensors."""
    layers = {layer.name: layer.weight.nbytes for name in names if (layer := plan.layers.get(name)) is not None}
    return sum(layers.values()) + sum(plan.copied[name].nbytes for name in names if name in plan.copied)


def _pieces(tensor: FloatTensor) -> Iterator[Tensor]:
    step = max(1, _BYTES_AT_A_TIME * tensor.row_count // max(1, tensor.nbytes))
    for start, stop in tensor.spans(step):
        yield tensor.rows(start, stop)


def _quantized_pieces(
    layer: QuantizedLayer, device: torch.device, error: WeightError, done: Callable[[int], object]
) -> Iterator[tuple[Tensor, Tensor]]:
    weight = layer.weight
    if layer.is_transposed:
        whole = weight.rows(0, weight.row_count).to(device).t()
        step = WeightError.rows_at_a_time(tuple(whole.shape))
        parts = (whole[start : start + step] for start in range(0, whole.shape[0], step))
    else:
        step = WeightError.rows_at_a_time(weight.shape)
        parts = (weight.rows(start, stop).to(device) for start, stop in weight.spans(step))
    for part in parts:
        q, scale = quantize_rows(part)
        if not scale.isfinite().all():
            raise CheckpointError(
                f"the weight of {layer.name!r} holds NaN or Inf, which can't be quantized: mend the checkpoint, or "
                "pass this name in skip"
            )
        error.add(part, q, scale)
        done(part.nbytes)
        yield q, scale
