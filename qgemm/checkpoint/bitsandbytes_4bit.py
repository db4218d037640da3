"""Layers of bitsandbytes' 4 bits (``load_in_4bit``, QLoRA): nf4 or fp4, whose scales may themselves be quantized.

Of a layer ``[N, K]`` the files hold

- ``<layer>.weight``: the codes of all values, row after row, two in a byte, the first in its high bits: uint8
  ``[N K / 2, 1]``, or the same bytes as another dtype;
- ``<layer>.weight.absmax``: the scale of each block of 64 values, over the ends of rows where K isn't a multiple of 64:
  float32; or uint8 with ``.nested_absmax`` and ``.nested_quant_map``, for ``map[absmax] * nested_absmax + offset``;
- ``<layer>.weight.quant_map``: the values of the codes, float32 ``[16]``;
- ``<layer>.weight.quant_state.bitsandbytes__nf4``, or ``__fp4``: uint8, JSON with the sizes of all these.

A layer here has groups in rows. Where K isn't a multiple of 64 they are as large as every block has whole ones of:
``gcd(K, 64)``.

Products are computed in the dtype of the input. So does bitsandbytes, but that it casts a float16 input to
``bnb_4bit_compute_dtype`` first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.safetensors_file import StoredTensor, read_values, unfit
from qgemm.checkpoint.words import by_rows, unpack_nibbles
from qgemm.numerics.formats import BNB_FP4, NF4, Format
from qgemm.numerics.groups import store_values
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import packed_width
from qgemm.scheme import QuantScheme, resolve_scheme

STATE = ".weight.quant_state.bitsandbytes__"
"""What stands between a layer's name and its kind in the name of the tensor that tells its sizes."""

KINDS = {"nf4": NF4, "fp4": BNB_FP4}
"""The formats by what the library calls them."""

_LARGEST_STATE = 1 << 16  # in bytes


@dataclass(frozen=True)
class _State:
    """A layer's kind, and what its JSON says. ``nested_block``: how many scales share one; 0 if none are quantized."""

    kind: str
    N: int
    K: int
    block: int
    nested_block: int = 0
    nested_offset: float = 0.0

    @property
    def group_size(self) -> int:
        return math.gcd(self.K, self.block)

    @property
    def scheme(self) -> QuantScheme:
        return resolve_scheme(self.form.name if self.group_size == 64 else f"{self.form.name}-{self.group_size}")

    @property
    def form(self) -> Format:
        return KINDS[self.kind]


def note_layers(contents: Contents) -> None:
    """Notes every layer of 4 bits. Raises ``CheckpointError``, naming file and tensor, for one that isn't as above."""
    stored = contents.stored
    states = {name: tensor for name, tensor in stored.items() if STATE in name}
    for name, tensor in states.items():
        if tensor.dtype != torch.uint8 or len(tensor.shape) != 1 or tensor.nbytes > _LARGEST_STATE:
            raise unfit(tensor.path, name, tensor, "torch.uint8, the bytes of a text")
    for name, value in read_values(states, torch.device("cpu")):
        layer, _, kind = name.partition(STATE)
        path = stored[name].path
        if kind not in KINDS:
            known = " and ".join(map(repr, KINDS))
            raise unsupported(f"{path}: layer {layer} is bitsandbytes' {kind!r}; of its 4 bits qgemm reads {known}")
        others = [other for other in KINDS if other != kind and f"{layer}{STATE}{other}" in states]
        if others:
            raise CheckpointError(f"{path}: {layer} has both {name} and {layer}{STATE}{others[0]}; it must have one")
        try:
            state = _parse(kind, bytes(value.tolist()))
        except ValueError as error:
            raise CheckpointError(f"{path}: {name} {error}") from error
        _note(contents, layer, name, state)


def _parse(kind: str, text: bytes) -> _State:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ValueError("isn't an object in JSON")
    shape = values.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(_is_size(size) and size for size in shape):
        raise ValueError(f"has the shape {shape!r}; it must be [N, K]")
    (N, K), block = shape, values.get("blocksize")
    if not _is_size(block) or not block:
        raise ValueError(f"has the blocksize {block!r}")
    if "nested_blocksize" not in values:
        return _State(kind, N, K, block)
    nested, offset = values["nested_blocksize"], values.get("nested_offset")
    if not _is_size(nested) or not nested or not isinstance(offset, float) or not math.isfinite(offset):
        raise ValueError(f"has the nested_blocksize {nested!r} and the nested_offset {offset!r}")
    return _State(kind, N, K, block, nested, offset)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _note(contents: Contents, layer: str, state_name: str, state: _State) -> None:
    stored, N, K = contents.stored, state.N, state.K
    names = {leaf: f"{layer}.weight{leaf and '.'}{leaf}" for leaf in ("", "absmax", "quant_map")}
    blocks = cdiv(N * K, state.block)
    if state.nested_block:
        names |= {leaf: f"{layer}.weight.{leaf}" for leaf in ("nested_absmax", "nested_quant_map")}
        _check(stored, names["nested_absmax"], torch.float32, cdiv(blocks, state.nested_block))
        _check(stored, names["nested_quant_map"], torch.float32, 256)
    path = stored[state_name].path
    weight = stored.get(names[""])
    if weight is None or weight.nbytes != cdiv(N * K, 2):
        raise unfit(path, names[""], weight, f"the {cdiv(N * K, 2)} bytes of [{N}, {K}]")
    _check(stored, names["absmax"], torch.uint8 if state.nested_block else torch.float32, blocks)
    _check(stored, names["quant_map"], torch.float32, 1 << state.form.bits)
    try:
        contents.manifest.layers[layer] = state.scheme
        contents.shapes[layer] = N, K
    except ValueError:
        raise CheckpointError(
            f"{path}: {layer} has {K} columns and blocks of {state.block}, which have only groups of "
            f"{state.group_size} values within a row; qgemm computes groups of any multiple of 16"
        ) from None
    made = {
        f"{layer}.weight": (names[""], (N, packed_width(K)), torch.uint8),
        f"{layer}.weight_scale": (names["absmax"], (N, K // state.group_size), torch.float32),
    }
    contents.convert_together(list(names.values()), made, partial(_decode, state))
    contents.pass_over(state_name)  # known already


def _check(stored: Mapping[str, StoredTensor], name: str, dtype: torch.dtype, count: int) -> None:
    tensor = stored.get(name)
    if tensor is None or tensor.dtype != dtype or math.prod(tensor.shape) != count:
        path = next(other.path for key, other in stored.items() if key.startswith(name.rpartition(".")[0]))
        raise unfit(path, name, tensor, f"{dtype}, [{count}]")


def _decode(state: _State, weight: Tensor, absmax: Tensor, quant_map: Tensor, *nested: Tensor) -> tuple[Tensor, Tensor]:
    if quant_map.tolist() != torch.tensor(state.form.table, dtype=torch.float32, device="cpu").tolist():
        raise ValueError(f"its quant_map isn't that of {state.kind}")
    octets = weight.reshape(-1).view(torch.uint8).view(state.N, state.K // 2)  # rows are whole groups of 16 or more
    values = by_rows(lambda some: store_values(unpack_nibbles(some, high_first=True), state.form), octets, state.K)
    scales = absmax.reshape(-1)
    if nested:
        nested_absmax, nested_map = (each.reshape(-1) for each in nested)
        larger = nested_absmax.repeat_interleave(state.nested_block)[: len(scales)]
        scales = nested_map[scales.int()] * larger + state.nested_offset
    first = torch.arange(0, state.N * state.K, state.group_size, device=scales.device)
    grouped = scales[first // state.block].view(state.N, -1)
    return values, grouped
