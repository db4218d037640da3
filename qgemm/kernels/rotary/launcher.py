"""Launcher of the rotary kernels: ``rotate``, ``rotate_and_store``, ``store_key_value`` and ``rotary_angles`` on a GPU.

Each is one launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.rotary.call import KeyValueStore, RotaryCall
from qgemm.kernels.rotary.kernels import _angles_kernel, _rotate_kernel
from qgemm.numerics.integers import cdiv, next_power_of_2

MAX_VALUES = 1024  # of a program's heads together, if there are many tokens
# Up to this many tokens, a thread has few values, and the next kernel may start, and wait, before this one has ended.
FEW_TOKENS = 64
VALUES_OF_THREAD, VALUES_OF_FEW = 16, 8
PROGRAMS_PER_SM = 4


def rotary_angles(
    positions: Tensor, frequencies: Tensor, scale: float, layout: str, dtype: torch.dtype, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``dispatch.rotary_angles`` on a GPU."""
    (B, S), half, copies = positions.shape[-2:], frequencies.shape[0], 1 if layout == "once" else 2
    cos, sin = (torch.empty((B, S, copies * half), dtype=dtype, device=positions.device) for _ in range(2))
    if not cos.numel():
        return cos, sin
    axes = axes if axes is None else axes.contiguous()
    kind = (rotary_angles, *_kinds(positions, frequencies, axes), scale, layout, dtype)
    launch: Launch | None = plans.get(kind)
    if launch is None:
        limits = device_limits(positions.device)
        block = next_power_of_2(half)
        constants = (scale, copies, layout == "twice", block, limits.pdl, limits.pdl and B * S <= FEW_TOKENS)
        numbers = (S, half, *(() if axes is not None else (0,)), *positions.stride(), *frequencies.stride())
        warps = min(max(block // limits.warp_size, 1), 4)
        launch = Launch(_angles_kernel, B * S, numbers, constants, num_warps=warps, pdl=limits.pdl)
        plans.keep(kind, launch)
    launch(positions, frequencies, axes, cos, sin)
    return cos, sin


def rotate(call: RotaryCall) -> tuple[Tensor, Tensor, Tensor]:
    """``dispatch.rotate`` on a GPU."""
    B, S, _ = call.qkv.shape
    k, v = (call.qkv.new_empty((B, call.kv_heads, S, call.head_size)) for _ in range(2))
    return rotate_and_store(call, KeyValueStore(k, v, None, None, None)), k, v


def store_key_value(key: Tensor, value: Tensor, store: KeyValueStore) -> None:
    """``dispatch.store_key_value`` on a GPU."""
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        key, value = key.contiguous(), value.contiguous()
    if not key.numel():
        return
    kind = (store_key_value, *_kinds(key, value, *store))
    launch: Launch | None = plans.get(kind)
    if launch is None:
        B, heads, S, D = key.shape
        strides = tuple(x.stride(dim) for x in (key, value) for dim in (0, 2, 1))
        sizes = (S, 0, heads, D, 0, store.k.shape[2], 0, 0)
        no_rotation = ("rms", 0.0, None, None, None, False, 1.0, 1.0, 0.0, False)
        launch = _make_launch(B * S, sizes, (0, *strides, 0, 0, 0, 0, 0), store, no_rotation)
        plans.keep(kind, launch)
    launch(key, key, value, None, None, None, None, None, key, *store)


def rotate_and_store(call: RotaryCall, store: KeyValueStore) -> Tensor:
    """``dispatch.rotate_and_store`` on a GPU."""
    q = call.qkv.new_empty((*call.qkv.shape[:2], call.q_heads, call.head_size))
    if q.numel():
        launch, tensors = find_launch(call, q, store)
        launch(*tensors)
    return q


def find_launch(call: RotaryCall, q: Tensor, store: KeyValueStore) -> tuple[Launch, tuple[Tensor | None, ...]]:
    """The launch that writes queries to ``q`` and keys and values to ``store``, and what to call it with."""
    qkv, cos, sin, q_weight, k_weight, norm, eps, q_heads, kv_heads, interleaved, values, *_ = call
    positions, factors = call.positions, (call.scale, call.period, call.growth, call.in_float)
    if qkv.stride(2) != 1:
        qkv = qkv.contiguous()
    if sin is not None and cos is not None and sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    q_weight, k_weight = (w if w is None else w.contiguous() for w in (q_weight, k_weight))
    (B, S, _), D = qkv.shape, call.head_size
    kind = (
        rotate_and_store, norm, eps, q_heads, kv_heads, interleaved, values, call.layout, factors,
        *_kinds(qkv, cos, q_weight, k_weight, positions, *store),
    )  # fmt: skip
    launch: Launch | None = plans.get(kind)
    if launch is None:
        strides = (call.q_step * D, *2 * (qkv.stride(0), qkv.stride(1), call.k_step * D))
        half, turns = (0, (0, 0, 0)) if cos is None else (cos.shape[2], cos.stride())
        if cos is not None and cos.shape[0] == 1:
            turns = (0, *turns[1:])
        places = (
            (0, 0)
            if positions is None
            else (0 if positions.shape[0] == 1 else positions.stride(0), positions.stride(1))
        )
        sizes = (S, q_heads, kv_heads, D, half, store.k.shape[2], call.k_head * D, call.v_head * D)
        weights = _weight_kind(q_weight, D), _weight_kind(k_weight, D)
        rotation = (norm, eps, *weights, None if values == "plain" else "none", interleaved, *factors)
        launch = _make_launch(B * S, sizes, (*strides, *turns, *places), store, rotation)
        plans.keep(kind, launch)
    return launch, (qkv, qkv, qkv, cos, sin, q_weight, k_weight, positions, q, *store)


def _make_launch(
    tokens: int,
    sizes: tuple[int, ...],
    in_strides: tuple[int, ...],
    store: KeyValueStore,
    rotation: tuple[Any, ...],
) -> Launch:
    """The launch for ``tokens`` tokens in all.

    ``sizes``, ``in_strides``: the kernel's numbers up to ``v_offset``, and up to ``stride_ps``. ``rotation``: its
    constants from ``NORM`` to ``IN_FLOAT``.
    """
    k, v, k_scale, v_scale, length = store
    limits = device_limits(k.device)
    q_heads, kv_heads, D = sizes[1:4]
    block_d = next_power_of_2(D)
    wide = [count for count, weight in ((q_heads, rotation[2]), (kv_heads, rotation[3])) if weight == "all"]
    block_h = next_power_of_2(max(wide)) if wide else heads_of_program(tokens, q_heads, kv_heads, block_d, limits)
    out_strides = (*k.stride()[:3], *v.stride()[:3])
    scale_strides = tuple(step for x in (k_scale, v_scale) for step in ((0, 0, 0) if x is None else x.stride()))
    length_stride = int(length is not None and length.shape[0] > 1)
    few = tokens <= FEW_TOKENS
    threads = block_h * block_d // (VALUES_OF_FEW if few else VALUES_OF_THREAD)
    warps = min(max(threads // limits.warp_size, 1), 8)
    return Launch(
        _rotate_kernel,
        tokens * (cdiv(q_heads, block_h) + 2 * cdiv(kv_heads, block_h)),
        (*sizes, *in_strides, *out_strides, *scale_strides, length_stride),
        (block_h, block_d, *rotation, limits.pdl, limits.pdl and few),
        num_warps=warps,
        pdl=limits.pdl,
    )


def heads_of_program(tokens: int, q_heads: int, kv_heads: int, block_d: int, limits: DeviceLimits) -> int:
    """The number of heads of a program: as many as leave each SM some programs, but at most the number of key heads."""
    most = max(1, min(MAX_VALUES // block_d, next_power_of_2(kv_heads or q_heads)))
    spread = tokens * (q_heads + 2 * kv_heads) // (PROGRAMS_PER_SM * limits.num_sms)
    return min(most, 1 << max(spread, 1).bit_length() - 1)


def _weight_kind(weight: Tensor | None, D: int) -> str | None:
    """The value of ``WEIGHT`` in the kernel's ``_normalized`` for a norm's ``weight``."""
    if weight is None:
        return None
    return "head" if weight.shape == (D,) else "own" if weight.ndim == 2 else "all"


def _kinds(*tensors: Tensor | None) -> tuple[object, ...]:
    return tuple(x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors)
