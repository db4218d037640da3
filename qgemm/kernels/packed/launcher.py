"""4-bit weights: groups along K with a scale each, eight values packed into an int32.

``scale = amax / 7.5`` of a group, ``q = clamp(round_half_even(w / scale), -8, 7)``, and ``q * scale`` stands for ``w``.
The largest value, 7.5 steps away, errs by half a step, as any other may. Where K is no multiple of the group's size,
the last group of each row is shorter. A group of zeros has scale 1, and one that holds NaN or Inf a scale of NaN.

Packed: ``[N, ceil(K / 8)]`` int32, value k in bits ``4 * (k % 8)`` to ``4 * (k % 8) + 3`` of number ``k // 8``, as
``q + 8``; what is left over in a row's last number is 0. It is the layout of compressed-tensors' ``pack-quantized``.

There is no kernel that multiplies by such a weight yet: ``packed_linear`` makes the float weight for every call. So it
saves memory, and time only where a float weight wouldn't fit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels.checks import FLOAT_DTYPES, conversion
from qgemm.kernels.reference import MIN_SCALE

LOW, HIGH = -8, 7
PER_WORD = 8
_STEPS = 7.5
# Temporaries are of so many values at a time.
_PIECE = 1 << 22


def words(K: int) -> int:
    """How many int32 numbers hold ``K`` values."""
    return -(-K // PER_WORD)


def groups(K: int, group_size: int) -> int:
    """How many groups there are in a row of ``K`` values."""
    return -(-K // group_size)


def quantize_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rounds float ``[n, K]`` to nearest: int8 ``[n, K]`` from -8 to 7, and float32 ``[n, ceil(K / group_size)]``."""
    K = weight.shape[1]
    values = weight.float()
    count = groups(K, group_size)
    padded = F.pad(values, (0, count * group_size - K))
    amax = padded.view(weight.shape[0], count, group_size).abs().amax(-1)
    # By a tensor: a GPU divides by a number with its rounded reciprocal.
    scale = (amax / torch.full_like(amax, _STEPS)).clamp(min=MIN_SCALE)
    scale = torch.where(amax == 0, 1.0, scale).masked_fill(~amax.isfinite(), torch.nan)
    q = (values / spread(scale, group_size, K)).round_().clamp_(LOW, HIGH)
    return q.nan_to_num_(0.0).to(torch.int8), scale


def spread(scale: Tensor, group_size: int, K: int) -> Tensor:
    """The scale of each value, ``[n, K]``, from those of groups ``[n, ceil(K / group_size)]``."""
    if scale.shape[1] == 1:
        return scale.expand(-1, K)
    return scale.repeat_interleave(group_size, dim=1)[:, :K]


def pack(values: Tensor) -> Tensor:
    """int8 ``[n, K]`` from -8 to 7 as int32 ``[n, ceil(K / 8)]``."""
    octets = F.pad((values - LOW).view(torch.uint8), (0, -values.shape[1] % PER_WORD))
    packed = torch.empty(values.shape[0], words(values.shape[1]), dtype=torch.int32, device=values.device)
    torch.bitwise_or(octets[:, ::2], octets[:, 1::2] << 4, out=packed.view(torch.uint8))
    return packed


def unpack(packed: Tensor, K: int) -> Tensor:
    """int8 ``[n, K]`` from int32 ``[n, ceil(K / 8)]``."""
    octets = packed.contiguous().view(torch.uint8)
    values = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)[:, :K]
    return values.view(torch.int8) + LOW


def dequantize(packed: Tensor, scale: Tensor, group_size: int, K: int, dtype: torch.dtype) -> Tensor:
    """The float weight ``[n, K]``: ``q * scale`` in float32, or in float64 if that is ``dtype``, then in ``dtype``."""
    n = packed.shape[0]
    out = torch.empty(n, K, dtype=dtype, device=packed.device)
    step = max(1, _PIECE // max(K, 1))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    for start in range(0, n, step):
        part = slice(start, start + step)
        out[part] = unpack(packed[part], K).to(exact).mul_(spread(scale[part], group_size, K))
    return out


@torch.no_grad()
def packed_linear(
    x: Tensor, weight: Tensor, scale: Tensor, in_features: int, group_size: int, bias: Tensor | None
) -> Tensor:
    """``x @ W.T + bias`` in the dtype of ``x``, where ``W`` is the weight that ``dequantize`` gives in that dtype.

    ``x``: float ``[..., K]``, ``K`` being ``in_features``. ``weight``: int32 ``[N, ceil(K / 8)]``. ``scale``: float32
    ``[N, ceil(K / group_size)]``. ``bias``: float ``[N]``. The product is PyTorch's.
    """
    check_packed_linear(x, weight, scale, in_features, group_size, bias)
    with torch.autocast(x.device.type, enabled=False):
        float_weight = dequantize(weight, scale, group_size, in_features, x.dtype)
        return F.linear(x, float_weight, None if bias is None else bias.to(x.dtype))


def check_packed_linear(
    x: Tensor, weight: Tensor, scale: Tensor, in_features: int, group_size: int, bias: Tensor | None
) -> None:
    """Raises if ``packed_linear`` can't take these."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x is {x.dtype}; a quantized layer takes float16, bfloat16, float32: {conversion(x)}")
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"x has {x.shape[-1] if x.ndim else 'no'} columns but the layer's in_features is {in_features}"
        )
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}; it must be at least 1")
    N = weight.shape[0] if weight.ndim else 0
    for name, tensor, dtype, shape in (
        ("weight", weight, torch.int32, (N, words(in_features))),
        ("scale", scale, torch.float32, (N, groups(in_features, group_size))),
    ):
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be {dtype} {list(shape)}")
    if bias is not None and (bias.dtype not in FLOAT_DTYPES or bias.shape != (N,)):
        wanted = f"float16, bfloat16 or float32, [{N}]: {conversion(bias)}"
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}; it must be {wanted}")
    for name, other in (("weight", weight), ("scale", scale), ("bias", bias)):
        if other is not None and other.device != x.device:
            raise ValueError(f"x is on {x.device} but {name} is on {other.device}: move them to one device")
