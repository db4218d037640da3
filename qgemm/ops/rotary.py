"""Operations between a merged q|k|v product and attention.

- ``rotate(qkv, cos, sin, q_weight, k_weight, norm, eps, q_heads, kv_heads, interleaved, values, layout, scale, period,
  growth, in_float, positions)``: queries, keys, values.
- ``rotate_and_store(..., k, v, k_scale, v_scale, length)``: queries; keys and values go to a cache.
- ``store_key_value(key, value, k, v, k_scale, v_scale, length)``: only writes to the cache.
- ``rotary_angles(positions, frequencies, scale, layout, dtype, axes)``: cosines and sines. They have no gradient.

The gradients of ``rotate`` are those of its formulas in PyTorch. The operators with a cache have none, not even for
queries.
"""

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.rotary import checks, dispatch
from qgemm.kernels.rotary.call import KeyValueStore, RotaryCall
from qgemm.kernels.rotary.reference import rotate_reference
from qgemm.ops.declare import NO_GRADIENT, gradients_through, operator
from qgemm.ops.direct import recall_launch, remember_launch, seen_by_others

_ROTATE = (
    "Tensor qkv, Tensor? cos, Tensor? sin, Tensor? q_weight, Tensor? k_weight, str norm, float eps, int q_heads, "
    "int kv_heads, bool interleaved, "
)
_FIELDS, _TENSORS = len(RotaryCall._fields), 5  # which come first; positions come last
_CACHE = "Tensor(a!) k, Tensor(b!) v, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor? length"


def rotate(call: RotaryCall) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.qgemm.rotate``, bypassing the dispatcher where nothing in it needs to see the call."""
    what, tensors = ("rotate", *call[_TENSORS:-1]), _tensors_of(call)
    out: Any = recall_launch(what, tensors)
    if out is None and seen_by_others(*tensors):
        out = torch.ops.qgemm.rotate(*call)
    elif out is None:
        out = dispatch.rotate(call)
        remember_launch(what, tensors, out, lambda: _find_launch(call, out[0], (*out[1:], None, None, None)))
    found: tuple[Tensor, Tensor, Tensor] = out
    return found


def rotate_and_store(call: RotaryCall, store: KeyValueStore) -> Tensor:
    """``torch.ops.qgemm.rotate_and_store``, bypassing the dispatcher as ``rotate`` does."""
    what, tensors = ("rotate_and_store", *call[_TENSORS:-1]), (*_tensors_of(call), *store)
    recalled = recall_launch(what, tensors)
    if recalled is not None:
        return recalled[0]
    out: Tensor
    if seen_by_others(*tensors):
        out = torch.ops.qgemm.rotate_and_store(*call, *store)
        return out
    out = dispatch.rotate_and_store(call, store)
    remember_launch(what, tensors, (out,), lambda: _find_launch(call, out, store))
    return out


def _tensors_of(call: RotaryCall) -> tuple[Any, ...]:
    """The first one isn't None."""
    return call.qkv, call.cos, call.sin, call.q_weight, call.k_weight, call.positions


def _find_launch(call: RotaryCall, q: Tensor, store: Any) -> Any:
    from qgemm.kernels.rotary import launcher

    return launcher.find_launch(call, q, KeyValueStore(*store))


def _rotate(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return dispatch.rotate(RotaryCall(*arguments))


def _rotate_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = RotaryCall(*arguments)
    checks.check_rotate(call)
    (B, S, _), heads, D = call.qkv.shape, call.kv_heads, call.head_size
    q, *others = (call.qkv.new_empty(shape) for shape in ((B, S, call.q_heads, D), *2 * [(B, heads, S, D)]))
    return q, others[0], others[1]


def _rotate_and_store(*arguments: Any) -> Tensor:
    return dispatch.rotate_and_store(RotaryCall(*arguments[:_FIELDS]), KeyValueStore(*arguments[_FIELDS:]))


def _rotate_and_store_fake(*arguments: Any) -> Tensor:
    call = RotaryCall(*arguments[:_FIELDS])
    checks.check_rotate_and_store(call, KeyValueStore(*arguments[_FIELDS:]))
    return call.qkv.new_empty((*call.qkv.shape[:2], call.q_heads, call.head_size))


def _store_key_value(key: Tensor, value: Tensor, *store: Any) -> None:
    dispatch.store_key_value(key, value, KeyValueStore(*store))


def _store_key_value_fake(key: Tensor, value: Tensor, *store: Any) -> None:
    checks.check_store_key_value(key, value, KeyValueStore(*store))


def _rotate_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = RotaryCall(*inputs)
    ctx.save_for_backward(*_tensors_of(call))
    ctx.rest = call[_TENSORS:-1]


def _rotate_backward(ctx: Any, wanted: tuple[bool, ...], *grads: Tensor) -> list[Tensor | None]:
    *saved, positions = ctx.saved_tensors
    sources = {at: saved[at] for at, want in enumerate(wanted) if want}

    def compute(*values: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(sources, values, strict=True))
        tensors = [given.get(at, each) for at, each in enumerate(saved)]
        return rotate_reference(RotaryCall(*tensors, *ctx.rest, positions))  # type: ignore[call-arg]

    found = dict(zip(sources, gradients_through(compute, list(sources.values()), grads), strict=True))
    return [found.get(at) for at in range(len(wanted))]


def _angles_fake(
    positions: Tensor, frequencies: Tensor, scale: float, layout: str, dtype: torch.dtype, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    columns = checks.check_rotary_angles(positions, frequencies, layout, dtype, axes)
    shape = (*positions.shape[-2:], columns)
    cos, sin = (positions.new_empty(shape, dtype=dtype) for _ in range(2))
    return cos, sin


operator(
    "rotary_angles(Tensor positions, Tensor frequencies, float scale, str layout, ScalarType dtype, "
    "Tensor? axes=None) -> (Tensor, Tensor)",
    compute=dispatch.rotary_angles,
    fake=_angles_fake,
)

operator(
    f"rotate({_ROTATE} str values='plain', str layout='in turn', float scale=1.0, float period=0.0, float growth=0.0, "
    "bool in_float=False, Tensor? positions=None) -> (Tensor, Tensor, Tensor)",
    compute=_rotate,
    fake=_rotate_fake,
    setup_context=_rotate_setup,
    backward=_rotate_backward,
)


operator(
    f"rotate_and_store({_ROTATE} str values, str layout, float scale, float period, float growth, bool in_float, "
    f"Tensor? positions, {_CACHE}) -> Tensor",
    compute=_rotate_and_store,
    fake=_rotate_and_store_fake,
    **NO_GRADIENT,
)

operator(
    f"store_key_value(Tensor key, Tensor value, {_CACHE}) -> ()",
    compute=_store_key_value,
    fake=_store_key_value_fake,
)
