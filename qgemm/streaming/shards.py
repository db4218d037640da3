"""Writes the tensors of one file, each of which is read, quantized and written a few rows at a time.

The progress can be recorded after any of these pieces. A later run continues there with the same pieces, and so writes
the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import BinaryIO

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_writer import SafetensorsWriter
from qgemm.model.swap import WeightError
from qgemm.nn.kinds import meta_linear
from qgemm.nn.linear_layer import largest
from qgemm.numerics.integers import cdiv
from qgemm.streaming.journal import Begun
from qgemm.streaming.shard_plan import FloatWeight, ShardPlan
from qgemm.warn import warn_user

_BYTES_AT_A_TIME = 16 << 20
# Of float values. A disk that writes 100 MB/s takes a second or two for the result.
_BYTES_BETWEEN_NOTES = 256 << 20


def write_shard(
    file: BinaryIO,
    shard: ShardPlan,
    device: torch.device,
    done: Callable[[int], object],
    begun: Begun,
    note: Callable[[Begun], object],
    metadata: Mapping[str, str],
) -> dict[str, float]:
    """Writes the tensors of ``shard`` to ``file``; returns the errors of the weights among them, by name.

    ``done`` is called with the number of bytes of float values processed. ``begun``: the progress so far; ``note`` is
    called with the progress now and then. ``metadata``: to add to the header. Raises ``CheckpointError``, naming the
    layer, for a weight that holds NaN or Inf.
    """
    writer = SafetensorsWriter(file, shard.tensors, metadata)
    if not writer.go_on(begun.written):
        warn_user(f"{file.name} differs from what was written, so it is made again")
        begun = Begun(begun.name)
    done(begun.read)
    errors = dict(begun.errors)
    read = noted = begun.read
    for index, unit in list(enumerate(shard.units))[begun.units :]:
        pieces, squares = (begun.pieces, begun.squares) if index == begun.units else (0, (0.0, 0.0))
        error = WeightError(squares)
        for nbytes, made in _made(shard, unit, device, error, pieces):
            for name, rows in made.items():
                if name in shard.tensors:
                    writer.write(name, rows)
            pieces += 1
            read += nbytes
            done(nbytes)
            if read - noted >= _BYTES_BETWEEN_NOTES:
                note(Begun(begun.name, writer.written, index, dict(errors), pieces, error.squares, read))
                noted = read
        if shard.units[unit] is not None:
            errors[unit] = error.value
    writer.finish()
    return errors


def _made(
    shard: ShardPlan, unit: str, device: torch.device, error: WeightError, skip: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The pieces of a unit after the first ``skip``: bytes of float values, and the resulting rows, by name."""
    weight = shard.units[unit]
    if weight is None:
        tensor = shard.copied[unit]
        step = max(1, _BYTES_AT_A_TIME * tensor.row_count // max(1, tensor.nbytes))
        for start, stop in list(tensor.spans(step))[skip:]:
            piece = tensor.rows(start, stop)
            yield piece.nbytes, {unit: piece}
        return
    layer = meta_linear(weight.scheme, weight.in_features, weight.out_features)
    started = -1
    for expert, index, part in _rows(weight, device, skip, layer.rows_in_step):
        if layer.whole_names and expert != started:
            layer.start_rows(device, _largest(weight, device, expert) if layer.needs_amax else None)
            started = expert
        try:
            made = layer.convert_rows(part)
        except ValueError as problem:
            raise CheckpointError(
                f"the weight of {weight.layer!r} holds NaN or Inf, or numbers too large for a scale, which can't be "
                "quantized: repair the checkpoint, or pass this name in skip"
            ) from problem
        error.add(part, partial(layer.restore_rows, made))
        nbytes = part.nbytes
        del part  # so that this expert's weight and the next one's aren't in memory together
        if index == 0:  # tensors that belong to the weight as a whole come with its first rows
            made |= {leaf: layer.stored(leaf).detach() for leaf in layer.whole_names}
        yield nbytes, {weight.parameters[leaf]: rows for leaf, rows in made.items()}


def _largest(weight: FloatWeight, device: torch.device, expert: int) -> Tensor:
    """The largest magnitude of a weight, or of one expert's, which is read one extra time for it."""
    if len(weight.values.shape) == 3:
        return largest(weight.values.rows(expert, expert + 1).to(device))
    return torch.stack([largest(rows) for _, _, rows in _rows(weight, device, 0, 1)]).amax()


def _rows(weight: FloatWeight, device: torch.device, skip: int, in_step: int) -> Iterator[tuple[int, int, Tensor]]:
    """The rows of a weight, in pieces of the size that ``WeightError`` wants, without the first ``skip`` pieces.

    Each comes with the number of its expert, 0 for a layer, and its piece's number in that expert.
    """
    values = weight.values
    if weight.is_transposed:
        rows = values.rows(0, values.row_count).to(device).t()
        pieces = rows.split(WeightError.rows_at_a_time(rows.shape, in_step))
        yield from ((0, piece, pieces[piece]) for piece in range(skip, len(pieces)))
        return
    step = WeightError.rows_at_a_time(values.shape, in_step)
    if len(values.shape) == 3:
        first, skip = divmod(skip, cdiv(values.shape[1], step))
        for expert in range(first, values.row_count):
            for piece, rows in list(enumerate(values.rows(expert, expert + 1)[0].to(device).split(step)))[skip:]:
                yield expert, piece, rows
            skip = 0
    else:
        for piece, (start, stop) in list(enumerate(values.spans(step)))[skip:]:
            yield 0, piece, values.rows(start, stop).to(device)
