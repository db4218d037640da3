"""Between a merged q|k|v product and attention.

- ``rotate(qkv, cos, sin, q_weight, k_weight, norm, eps, q_heads, kv_heads, interleaved)``: queries, keys, values.
- ``rotate_and_store(..., k, v, k_scale, v_scale, length)``: queries; keys and values go to a cache.
- ``store_key_value(key, value, k, v, k_scale, v_scale, length)``: the cache alone.
- ``rotary_angles(positions, frequencies, scale, layout, dtype)``: cosines and sines. They have no gradient.

The gradients of ``rotate`` are those of its formulas in PyTorch; with a cache there are none, not for queries either.
"""

from typing import Any

import torch
from torch import Tensor

from qgemm.kernels import dispatch
from qgemm.kernels.rotary import checks
from qgemm.kernels.rotary.reference import rotate_reference
from qgemm.ops.declare import operator

_ROTATE = (
    "Tensor qkv, Tensor? cos, Tensor? sin, Tensor? q_weight, Tensor? k_weight, str norm, float eps, int q_heads, "
    "int kv_heads, bool interleaved"
)
_CACHE = "Tensor(a!) k, Tensor(b!) v, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor length"


def _rotate_fake(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    D, (B, S, _), (q_heads, kv_heads) = checks.check_rotate(qkv, *arguments[:8]), qkv.shape, arguments[6:8]
    k, v = (qkv.new_empty((B, kv_heads, S, D)) for _ in range(2))
    return qkv.new_empty((B, S, q_heads, D)), k, v


def _rotate_and_store_fake(qkv: Tensor, *arguments: Any) -> Tensor:
    D, (B, S, _), (q_heads, kv_heads) = checks.check_rotate(qkv, *arguments[:8]), qkv.shape, arguments[6:8]
    checks.check_cache(B, kv_heads, D, qkv.dtype, *arguments[9:])
    return qkv.new_empty((B, S, q_heads, D))


def _rotate_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _rotate_backward(ctx: Any, wanted: tuple[bool, ...], *grads: Tensor) -> list[Tensor | None]:
    given = zip(ctx.saved_tensors, wanted, strict=False)
    inputs: list[Any] = [None if x is None else x.detach().requires_grad_(want) for x, want in given]
    with torch.enable_grad():
        outputs = rotate_reference(*inputs, *ctx.rest)
    sources = [x for x in inputs if x is not None and x.requires_grad]
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
    outs, out_grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, sources, out_grads, allow_unused=True))
    return [next(found) if want else None for want in wanted]


def _angles_fake(
    positions: Tensor, frequencies: Tensor, scale: float, layout: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, checks.check_rotary_angles(positions, frequencies, layout, dtype))
    cos, sin = (positions.new_empty(shape, dtype=dtype) for _ in range(2))
    return cos, sin


operator(
    "rotary_angles(Tensor positions, Tensor frequencies, float scale, str layout, ScalarType dtype) -> "
    "(Tensor, Tensor)",
    cpu=dispatch.rotary_angles,
    cuda=dispatch.rotary_angles,
    fake=_angles_fake,
)

operator(
    f"rotate({_ROTATE}) -> (Tensor, Tensor, Tensor)",
    cpu=dispatch.rotate,
    cuda=dispatch.rotate,
    fake=_rotate_fake,
    setup_context=_rotate_setup,
    backward=_rotate_backward,
)


operator(
    f"rotate_and_store({_ROTATE}, {_CACHE}) -> Tensor",
    cpu=dispatch.rotate_and_store,
    cuda=dispatch.rotate_and_store,
    fake=_rotate_and_store_fake,
    setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(output),
    backward=lambda ctx, wanted, grad: [None] * len(wanted),
)

operator(
    f"store_key_value(Tensor key, Tensor value, {_CACHE}) -> ()",
    cpu=dispatch.store_key_value,
    cuda=dispatch.store_key_value,
    fake=checks.check_store_key_value,
)
