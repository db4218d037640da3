"""Checks of the arguments of ``rotate``, ``rotate_and_store`` and ``store_key_value``, as in ``kernels/checks.py``."""

import torch
from torch import Tensor

from qgemm.kernels.checks import check_form, check_same_device, check_strided, conversion, names_of
from qgemm.kernels.norms import NORMS_OF_HEADS, Norm
from qgemm.kernels.rotary.call import LAYOUTS, VALUES, KeyValueStore, RotaryCall
from qgemm.kernels.rotary.reference import ANGLES
from qgemm.numerics.formats import FLOAT_DTYPES, INT8


def check_rotary_angles(
    positions: Tensor, frequencies: Tensor, layout: str, dtype: torch.dtype, axes: Tensor | None = None
) -> int:
    """Raises if ``rotary_angles`` doesn't accept these; returns the number of columns."""
    if layout not in ANGLES:
        raise ValueError(f"layout is {layout!r}; it must be one of {sorted(ANGLES)}")
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype is {dtype}; rotary_angles accepts {names_of(FLOAT_DTYPES)}")
    wanted = "[B, S]" if axes is None else "[A, B, S] with axes"
    if positions.ndim != (2 if axes is None else 3) or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions is {positions.dtype} {list(positions.shape)}; it must be integers, {wanted}")
    if frequencies.ndim != 1 or frequencies.dtype not in FLOAT_DTYPES:
        raise ValueError(f"frequencies is {frequencies.dtype} {list(frequencies.shape)}; it must be floats, [R / 2]")
    check_form("axes", axes, (torch.int32,), frequencies.shape)
    check_same_device(positions=positions, frequencies=frequencies, axes=axes)
    return frequencies.shape[0] * (1 if layout == "once" else 2)


def check_rotate(call: RotaryCall) -> None:
    """Raises if ``rotate`` doesn't accept it."""
    qkv, cos, sin, q_weight, k_weight, norm, eps, q_heads, kv_heads, _, values, *_ = call
    if qkv.dtype not in FLOAT_DTYPES:
        raise TypeError(f"qkv is {qkv.dtype}; rotate accepts {names_of(FLOAT_DTYPES)}: {conversion(qkv)}")
    check_strided("qkv", qkv)
    if values not in VALUES:
        raise ValueError(f"values is {values!r}; it must be one of {sorted(VALUES)}")
    if call.layout not in LAYOUTS:
        raise ValueError(f"layout is {call.layout!r}; it must be one of {sorted(LAYOUTS)}")
    if call.layout == "by head" and (q_heads != kv_heads or values == "of keys"):
        raise ValueError(
            f"q_heads is {q_heads}, kv_heads {kv_heads} and values {values!r}; by head, each query has a key and a "
            "value"
        )
    heads = call.heads
    if q_heads < 1 or kv_heads < 0 or (kv_heads and q_heads % kv_heads):
        raise ValueError(
            f"q_heads is {q_heads} and kv_heads {kv_heads}; both are from 1 on, the one a multiple of the other, or "
            "kv_heads is 0 for queries alone"
        )
    if qkv.ndim != 3 or qkv.shape[2] == 0 or qkv.shape[2] % heads:
        raise ValueError(
            f"qkv is {list(qkv.shape)}; it must be [B, S, heads * D], and {heads} heads are wanted, all in all"
        )
    Norm(norm, eps)
    if norm not in NORMS_OF_HEADS:
        raise ValueError(f"norm is {norm!r}; of queries and keys it must be one of {sorted(NORMS_OF_HEADS)}")
    _check_angles(cos, sin, qkv, call.head_size)
    for name, weight, count in (("q_weight", q_weight, q_heads), ("k_weight", k_weight, kv_heads)):
        _check_weight(name, weight, count, call.head_size, qkv.dtype)
    _check_positions(call)
    check_same_device(qkv=qkv, cos=cos, sin=sin, q_weight=q_weight, k_weight=k_weight, positions=call.positions)


def _check_positions(call: RotaryCall) -> None:
    positions, (B, S, _) = call.positions, call.qkv.shape
    if positions is None:
        return
    is_of_call = positions.ndim == 2 and positions.shape[1] == S and positions.shape[0] in (1, B)
    if positions.dtype not in (torch.int32, torch.int64) or not is_of_call:
        raise ValueError(
            f"positions is {positions.dtype} {list(positions.shape)}; it must be integers, [1 or {B}, {S}]"
        )
    if call.period <= 0:
        raise ValueError(f"period is {call.period}; with positions it must be positive")


def _check_angles(cos: Tensor | None, sin: Tensor | None, qkv: Tensor, D: int) -> None:
    B, S, _ = qkv.shape
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin go together: give both or none")
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor is None:
            continue
        if tensor.dtype not in (qkv.dtype, torch.float32):
            raise TypeError(f"{name} is {tensor.dtype}; it must be {qkv.dtype}, as qkv, or torch.float32")
        # The size first: under torch.export the batch may be symbolic.
        if tensor.ndim != 3 or tensor.shape[1] != S or (tensor.shape[0] != B and tensor.shape[0] != 1):
            raise ValueError(f"{name} is {list(tensor.shape)}; it must be [1 or {B}, {S}, R / 2]")
        if not 1 <= tensor.shape[2] <= D // 2:
            raise ValueError(
                f"{name} has {tensor.shape[2]} columns; it must have one for each pair, at most {D // 2} of a head of "
                f"{D}: pass one half, {name}[..., :{D // 2}]"
            )
    if cos is not None and sin is not None and (cos.shape != sin.shape or cos.dtype != sin.dtype):
        raise ValueError(
            f"cos is {cos.dtype} {list(cos.shape)} and sin is {sin.dtype} {list(sin.shape)}: make them alike"
        )


def _check_weight(name: str, weight: Tensor | None, count: int, D: int, dtype: torch.dtype) -> None:
    """Of a norm of ``count`` heads of ``D`` values in ``dtype``."""
    if weight is None:
        return
    if weight.dtype != dtype:
        raise TypeError(f"{name} is {weight.dtype}; it must be {dtype}, as qkv")
    if weight.shape not in ((D,), (count, D), (count * D,)):
        raise ValueError(f"{name} is {list(weight.shape)}; it must be [{D}], [{count}, {D}] or [{count * D}]")


def check_rotate_and_store(call: RotaryCall, store: KeyValueStore) -> None:
    """Raises if ``rotate_and_store`` doesn't accept these."""
    check_rotate(call)
    check_cache(call.qkv.shape[0], call.kv_heads, call.head_size, call.qkv.dtype, store)
    check_same_device(qkv=call.qkv, k=store.k)


def check_cache(batch: int, kv_heads: int, D: int, dtype: torch.dtype, store: KeyValueStore) -> None:
    """Raises if keys and values ``[batch, kv_heads, S, D]`` of ``dtype`` can't be stored there."""
    k, v, k_scale, v_scale, length = store
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale go together: give both or none")
    wanted = dtype if k_scale is None else INT8.storage
    for name, rows, scale in (("k", k, k_scale), ("v", v, v_scale)):
        if rows.dtype != wanted:
            with_scales = "without scales" if scale is None else "with scales"
            raise TypeError(f"{name} is {rows.dtype}; a cache of {dtype} {with_scales} is {wanted}")
        if rows.ndim != 4 or (rows.shape[0], rows.shape[1], rows.shape[3]) != (batch, kv_heads, D):
            raise ValueError(f"{name} is {list(rows.shape)}; it must be [{batch}, {kv_heads}, L, {D}]")
        if rows.stride(3) != 1:
            raise ValueError(f"{name} has strides {rows.stride()}; its last dimension must be contiguous")
        check_form(f"{name}_scale", scale, (torch.float32,), rows.shape[:3])
    if k.shape != v.shape:
        raise ValueError(f"k is {list(k.shape)} and v is {list(v.shape)}: they must be alike")
    if length is not None and (
        length.dtype != torch.int32 or length.ndim != 1 or (length.shape[0] != batch and length.shape[0] != 1)
    ):
        raise ValueError(f"length is {length.dtype} {list(length.shape)}; it must be torch.int32 [1] or [{batch}]")
    check_same_device(k=k, v=v, k_scale=k_scale, v_scale=v_scale, length=length)


def check_store_key_value(key: Tensor, value: Tensor, store: KeyValueStore) -> None:
    """Raises if ``store_key_value`` doesn't accept these."""
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}; a cache accepts {names_of(FLOAT_DTYPES)}: {conversion(tensor)}")
        check_strided(name, tensor)
        if tensor.ndim != 4:
            raise ValueError(f"{name} is {list(tensor.shape)}; it must be [B, kv_heads, S, D]")
    if key.shape != value.shape or key.dtype != value.dtype:
        raise ValueError(
            f"key is {key.dtype} {list(key.shape)} and value is {value.dtype} {list(value.shape)}: they must be alike"
        )
    B, kv_heads, _, D = key.shape
    check_cache(B, kv_heads, D, key.dtype, store)
    check_same_device(key=key, value=value, k=store.k)
