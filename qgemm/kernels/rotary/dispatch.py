"""Norms of queries and keys, rotary embedding and writing to a cache, wherever the tensors are; as ``dispatch.py``.

On a CPU by ``reference.py``, which is the specification; on a GPU by ``launcher.py``.
"""

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.checks import on_gpu
from qgemm.kernels.rotary.call import KeyValueStore, RotaryCall
from qgemm.kernels.rotary.checks import (
    check_rotary_angles,
    check_rotate,
    check_rotate_and_store,
    check_store_key_value,
)
from qgemm.kernels.rotary.reference import rotary_angles_reference, rotate_reference, store_reference


def rotary_angles(
    positions: Tensor, frequencies: Tensor, scale: float, layout: str, dtype: torch.dtype, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a rotary embedding, ``[B, S, columns]`` each: ``round(cos(position * frequency) * scale)``.

    Everything is float32, rounded once to ``dtype``. ``positions``: integers ``[B, S]``. ``frequencies``: floats
    ``[R / 2]``, one for each pair. ``layout``: ``"once"``: a column for each pair, as ``rotate`` expects it;
    ``"twice"``: followed by the same columns again (Llama's); ``"each twice"``: two adjacent columns for each pair
    (Cohere's).

    ``axes``: int32 ``[R / 2]``: positions are ``[A, B, S]``, and a pair has those of its axis, from 0 to A - 1, such as
    time, height and width in Qwen2-VL.
    """
    check_rotary_angles(positions, frequencies, layout, dtype, axes)
    if on_gpu(positions):
        out: tuple[Tensor, Tensor] = _launcher().rotary_angles(positions, frequencies, scale, layout, dtype, axes)
        return out
    with torch.no_grad():
        return rotary_angles_reference(positions, frequencies, scale, layout, dtype, axes)


def rotate(call: RotaryCall) -> tuple[Tensor, Tensor, Tensor]:
    """Norms of queries and keys, then rotary embedding: ``q [B, S, q_heads, D]``, ``k``, ``v [B, kv_heads, S, D]``."""
    check_rotate(call)
    if on_gpu(call.qkv):
        out: tuple[Tensor, Tensor, Tensor] = _launcher().rotate(call)
        return out
    with torch.no_grad():
        return rotate_reference(call)


def rotate_and_store(call: RotaryCall, store: KeyValueStore) -> Tensor:
    """``rotate``, with keys and values written to a cache as by ``store_key_value``: ``q [B, S, q_heads, D]``."""
    check_rotate_and_store(call, store)
    if on_gpu(call.qkv):
        out: Tensor = _launcher().rotate_and_store(call, store)
        return out
    with torch.no_grad():
        q, key, value = rotate_reference(call)
        store_reference(key, value, store)
    return q


def store_key_value(key: Tensor, value: Tensor, store: KeyValueStore) -> None:
    """Writes ``key`` and ``value``, ``[B, kv_heads, S, D]``, to a cache, from place ``length - S`` on.

    Without a length, from the first place on. Whatever would lie outside the cache isn't written.
    """
    check_store_key_value(key, value, store)
    if on_gpu(key):
        _launcher().store_key_value(key, value, store)
        return
    with torch.no_grad():
        store_reference(key, value, store)


def _launcher() -> Any:
    """The launcher, imported only when it's needed: it imports Triton."""
    from qgemm.kernels.rotary import launcher

    return launcher
