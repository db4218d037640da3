"""Writes the tensors of one file, each read, quantized and written a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

import torch
from torch import Tensor, nn

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_writer import SafetensorsWriter
from qgemm.checkpoint.tensors import split_name
from qgemm.kernels import quantize_rows
from qgemm.nn import LinearLayer
from qgemm.streaming.float_tensors import FloatTensor
from qgemm.streaming.plan import Plan, QuantizedWeight
from qgemm.swap import WeightError

_BYTES_AT_A_TIME = 16 << 20


def write_shard(
    file: BinaryIO, plan: Plan, names: list[str], device: torch.device, done: Callable[[int], object]
) -> dict[str, float]:
    """Writes the tensors called ``names`` to ``file``; returns the errors of the weights among them, by name.

    ``done`` is told the bytes of float values that were dealt with. Raises ``ValueError`` for a weight that holds NaN
    or Inf, naming the layer.
    """
    errors: dict[str, float] = {}
    writer = SafetensorsWriter(file, {name: plan.tensors[name] for name in names})
    in_shard = set(names)
    for name in names:
        weight = plan.weights.get(name)
        if weight is None:
            for piece in _pieces(plan.copied[name]):
                writer.write(name, piece)
                done(piece.nbytes)
        elif weight.name not in errors:
            error = WeightError()
            for made in _quantized_pieces(weight, plan.model.get_submodule(weight.layer), device, error, done):
                for leaf, rows in made.items():
                    if (full_name := f"{weight.layer}.{leaf}") in in_shard:
                        writer.write(full_name, rows)
            errors[weight.name] = error.value
    writer.finish()
    return errors


def bytes_to_read(plan: Plan, names: list[str]) -> int:
    """The bytes of float values that ``write_shard`` deals with for these tensors."""
    weights = {weight.name: weight.values.nbytes for name in names if (weight := plan.weights.get(name)) is not None}
    return sum(weights.values()) + sum(plan.copied[name].nbytes for name in names if name in plan.copied)


def _pieces(tensor: FloatTensor) -> Iterator[Tensor]:
    step = max(1, _BYTES_AT_A_TIME * tensor.row_count // max(1, tensor.nbytes))
    for start, stop in tensor.spans(step):
        yield tensor.rows(start, stop)


def _quantized_pieces(
    weight: QuantizedWeight,
    layer: nn.Module,
    device: torch.device,
    error: WeightError,
    done: Callable[[int], object],
) -> Iterator[dict[str, Tensor]]:
    """The rows of the tensors that a weight becomes, some at a time, by their names in ``layer``."""
    _, leaf = split_name(weight.name)
    for part in _rows(weight, device):
        try:
            made = layer.quantize_rows(part) if isinstance(layer, LinearLayer) else _rows_of_experts(leaf, part)
        except ValueError as problem:
            raise CheckpointError(
                f"the weight of {weight.layer!r} holds NaN or Inf, which can't be quantized: mend the checkpoint, or "
                "pass this name in skip"
            ) from problem
        if isinstance(layer, LinearLayer):
            error.add(part, layer.restore_rows(made, torch.float64))
        else:
            error.add(part, made[leaf].double().mul_(made[f"{leaf}_scale"][:, None]))
        done(part.nbytes)
        del part  # of the next expert's weight and this one's only one need be in memory
        yield made


def _rows_of_experts(leaf: str, rows: Tensor) -> dict[str, Tensor]:
    q, scale = quantize_rows(rows)
    if not scale.isfinite().all():
        raise ValueError(f"{leaf} holds NaN or Inf")
    return {leaf: q, f"{leaf}_scale": scale}


def _rows(weight: QuantizedWeight, device: torch.device) -> Iterator[Tensor]:
    """The rows of a weight, as many at a time as ``WeightError`` wants."""
    values = weight.values
    if weight.is_transposed:
        rows = values.rows(0, values.row_count).to(device).t()
        yield from rows.split(WeightError.rows_at_a_time(rows.shape))
        return
    step = WeightError.rows_at_a_time(values.shape)
    if len(values.shape) == 3:
        for expert in range(values.row_count):
            yield from values.rows(expert, expert + 1)[0].to(device).split(step)
    else:
        for start, stop in values.spans(step):
            yield values.rows(start, stop).to(device)
