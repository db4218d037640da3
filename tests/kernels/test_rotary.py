"""``rotate``, ``rotate_and_store``, ``store_key_value``: where values come to lie, and what is refused.

``tests/integrations/test_transformers_rotary.py`` compares the values with those of models.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels import dispatch

HEADS, KV_HEADS, D = 4, 2, 16


def arguments(
    dtype: torch.dtype, device: torch.device, B: int = 2, S: int = 3, angle_dtype: torch.dtype | None = None
) -> tuple[Any, ...]:
    """Those of ``rotate``."""
    qkv = torch.randn(B, S, (HEADS + 2 * KV_HEADS) * D, device=device).to(dtype)
    angle = torch.rand(1, S, D // 2, device=device) * 6
    cos, sin = (x.to(angle_dtype or dtype) for x in (angle.cos(), angle.sin()))
    weights = [torch.randn(D, device=device).to(dtype) for _ in range(2)]
    return qkv, cos, sin, *weights, "rms", 1e-6, HEADS, KV_HEADS, False


def cache(stored: torch.dtype, device: torch.device, B: int = 2, L: int = 10) -> list[Tensor | None]:
    """k, v and their scales, filled with what must stay where nothing is stored."""
    shape = (B, KV_HEADS, L)
    stores: list[Tensor | None] = [torch.full((*shape, D), 9, dtype=stored, device=device) for _ in range(2)]
    return stores + [torch.full(shape, 7.0, device=device) if stored == torch.int8 else None for _ in range(2)]


def int32(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


STORED = pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8], ids=str)


@STORED
@pytest.mark.parametrize("function", ["rotate_and_store", "store_key_value"])
# All rows alike; each its own; beyond the end, before the start, and outside altogether.
@pytest.mark.parametrize("length", [(5,), (3, 10), (12, 1), (10, 14), (0, -5)], ids=str)
def test_where_rows_are_stored(
    length: tuple[int, ...], function: str, stored: torch.dtype, device: torch.device
) -> None:
    rotated = arguments(torch.bfloat16, device)
    q, key, value = dispatch.rotate(*rotated)
    stores = cache(stored, device)
    lengths = int32(*length, device=device)
    if function == "rotate_and_store":
        assert torch.equal(dispatch.rotate_and_store(*rotated, *stores, lengths), q)
    else:
        dispatch.store_key_value(key, value, *stores, lengths)
    wanted = cache(stored, device)
    for new, store, scale in zip((key, value), wanted[:2], wanted[2:], strict=True):
        rows, scales = dispatch.quantize_rows(new) if scale is not None else (new, None)
        for row in range(2):
            for token in range(3):
                at = length[row % len(length)] - 3 + token
                if 0 <= at < 10:
                    store[row, :, at] = rows[row, :, token]
                    if scale is not None:
                        scale[row, :, at] = scales[row, :, token]
    for found, each in zip(stores, wanted, strict=True):
        assert each is None or torch.equal(found, each)


def test_values_that_are_not_finite_become_a_row_of_nan(device: torch.device) -> None:
    key, value = torch.randn(1, KV_HEADS, 3, D, device=device), torch.zeros(1, KV_HEADS, 3, D, device=device)
    key[0, 0, 1, 3], key[0, 1, 2, 0] = torch.nan, torch.inf
    stores = cache(torch.int8, device, B=1)
    dispatch.store_key_value(key, value, *stores, int32(3, device=device))
    k, v, k_scale, v_scale = stores
    assert k_scale[0, :, :3].isnan().tolist() == [[False, True, False], [False, False, True]]
    assert not k[0, 0, 1].any()
    assert (v_scale[:, :, :3] == 1).all()
    assert not v[:, :, :3].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_strides(dtype: torch.dtype, device: torch.device) -> None:
    # A product of few rows may be a part of a larger one; angles are a half of what the model computes.
    qkv, cos, sin, *rest = arguments(dtype, device)
    wide = torch.randn(2, 6, 2 * qkv.shape[2], device=device).to(dtype)
    part = wide[:, ::2, 5 : 5 + qkv.shape[2]]
    part.copy_(qkv)
    whole = torch.cat((cos, cos), -1), torch.stack((sin, sin), -1).flatten(-2)
    found = dispatch.rotate(part, whole[0][..., : D // 2], whole[1][..., ::2], *rest)
    for ours, wanted in zip(found, dispatch.rotate(qkv, cos, sin, *rest), strict=True):
        assert torch.equal(ours, wanted)
        assert ours.is_contiguous()


def test_a_cache_of_any_layout(device: torch.device) -> None:
    # Keys beside values, tokens before heads, as others lay them out.
    rotated = arguments(torch.float32, device)
    stores = torch.zeros(2, 10, 2, KV_HEADS, D, device=device)
    k, v = stores.permute(2, 0, 3, 1, 4).unbind()
    dispatch.rotate_and_store(*rotated, k, v, None, None, int32(7, device=device))
    _, key, value = dispatch.rotate(*rotated)
    assert torch.equal(k[:, :, 4:7], key)
    assert torch.equal(v[:, :, 4:7], value)
    assert not stores[:, :4].any()


@pytest.mark.parametrize("S", [0, 1])
@pytest.mark.parametrize("B", [0, 1])
def test_nothing_to_do(B: int, S: int, device: torch.device) -> None:
    rotated = arguments(torch.bfloat16, device, B, S)
    q, k, v = dispatch.rotate(*rotated)
    assert (q.shape, k.shape, v.shape) == ((B, S, HEADS, D), (B, KV_HEADS, S, D), (B, KV_HEADS, S, D))
    stores = cache(torch.int8, device, B)
    assert dispatch.rotate_and_store(*rotated, *stores, int32(4, device=device)).shape == q.shape


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (
            0,
            torch.zeros(2, 3, 128, dtype=torch.float64),
            "qkv is torch.float64; rotate accepts float16, bfloat16, float32",
        ),
        (0, torch.zeros(2, 3, 100), r"qkv is \[2, 3, 100\]; it must be \[B, S, \(q_heads \+ 2 \* kv_heads\) \* D\]"),
        (1, torch.zeros(1, 3, 16), r"cos has 16 columns; .* at most 8 of a head of 16: pass one half, cos\[..., :8\]"),
        (1, torch.zeros(3, 3, 8), r"cos is \[3, 3, 8\]; it must be \[1 or 2, 3, R / 2\]"),
        (1, torch.zeros(1, 3, 4), "cos is .* and sin is .*: make them alike"),
        (1, torch.zeros(1, 3, 8, dtype=torch.float16), "cos is torch.float16; it must be torch.float32"),
        (2, None, "cos and sin go together: give both or none"),
        (3, torch.zeros(32), r"q_weight is \[32\]; it must be \[16\], \[4, 16\] or \[64\]"),
        (4, torch.zeros(16).half(), "k_weight is torch.float16; it must be torch.float32, as qkv"),
        (5, "l2", "norm is 'l2'"),
        (7, 3, "q_heads is 3 and kv_heads 2; both are from 1 on, the one a multiple of the other"),
        (
            10,
            torch.zeros(2, 2, 10, 16, dtype=torch.int8),
            "k is torch.int8; a cache of torch.float32 without scales is",
        ),
        (11, torch.zeros(2, 2, 9, 16), r"k is \[2, 2, 10, 16\] and v is \[2, 2, 9, 16\]: they must be alike"),
        (11, torch.zeros(2, 3, 10, 16), r"v is \[2, 3, 10, 16\]; it must be \[2, 2, L, 16\]"),
        (12, torch.zeros(2, 2, 10), "k_scale and v_scale go together"),
        (14, torch.zeros(1), r"length is torch.float32 \[1\]; it must be torch.int32 \[1\] or \[2\]"),
    ],
)
@pytest.mark.parametrize("where", ["real", "meta"])
def test_what_is_refused(position: int, value: Any, message: str, where: str) -> None:
    device = torch.device("cpu")
    given = [*arguments(torch.float32, device), *cache(torch.float32, device), int32(4, device=device)]
    given[position] = value
    if where == "meta":
        given = [x.to("meta") if isinstance(x, Tensor) else x for x in given]
    with pytest.raises((ValueError, TypeError), match=message):
        torch.ops.qgemm.rotate_and_store(*given)
