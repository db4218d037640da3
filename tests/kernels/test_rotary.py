"""``rotate``, ``rotate_and_store``, ``store_key_value``: where values come to lie, and what is refused.

``tests/integrations/test_transformers_rotary.py`` compares the values with those of models.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels.reference import quantize_rows_reference
from qgemm.kernels.rotary import dispatch, launcher
from qgemm.kernels.rotary.call import KeyValueStore, RotaryCall
from qgemm.kernels.rotary.reference import ANGLES, rotate_reference
from tests.kernels.devices import A100, H200

# The kernel itself (interpreted on a CPU), and what a user's call runs.
FUNCTIONS = pytest.mark.parametrize("functions", [launcher, dispatch], ids=["kernel", "user"])
HEADS, KV_HEADS, D = 4, 2, 16


def arguments(
    dtype: torch.dtype, device: torch.device, B: int = 2, S: int = 3, angle_dtype: torch.dtype | None = None
) -> RotaryCall:
    """Of queries, keys and values at random."""
    qkv = torch.randn(B, S, (HEADS + 2 * KV_HEADS) * D, device=device).to(dtype)
    angle = torch.rand(1, S, D // 2, device=device) * 6
    cos, sin = (x.to(angle_dtype or dtype) for x in (angle.cos(), angle.sin()))
    weights = [torch.randn(D, device=device).to(dtype) for _ in range(2)]
    return RotaryCall(qkv, cos, sin, *weights, "rms", 1e-6, HEADS, KV_HEADS, False)


def cache(stored: torch.dtype, device: torch.device, B: int = 2, L: int = 10) -> list[Tensor | None]:
    """k, v and their scales, filled with what must stay where nothing is stored."""
    shape = (B, KV_HEADS, L)
    stores: list[Tensor | None] = [torch.full((*shape, D), 9, dtype=stored, device=device) for _ in range(2)]
    return stores + [torch.full(shape, 7.0, device=device) if stored == torch.int8 else None for _ in range(2)]


def int32(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
STORED = pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8], ids=str)


@FUNCTIONS
@STORED
@pytest.mark.parametrize(
    ("function", "length"),
    [
        ("rotate_and_store", (5,)),
        ("rotate_and_store", (3, 10)),  # each row its own
        ("rotate_and_store", (12, 1)),  # beyond the end and before the start
        ("rotate_and_store", ()),  # at the beginning
        ("store_key_value", (12, 1)),
        ("store_key_value", (14, -5)),  # outside altogether
    ],
    ids=str,
)
def test_where_rows_are_stored(
    length: tuple[int, ...], function: str, stored: torch.dtype, functions: Any, device: torch.device
) -> None:
    rotated = arguments(torch.bfloat16, device)
    q, key, value = functions.rotate(rotated)
    stores = cache(stored, device)
    lengths, length = (int32(*length, device=device), length) if length else (None, (3,))
    if function == "rotate_and_store":
        assert torch.equal(functions.rotate_and_store(rotated, KeyValueStore(*stores, lengths)), q)
    else:
        functions.store_key_value(key, value, KeyValueStore(*stores, lengths))
    wanted = cache(stored, device)
    for new, store, scale in zip((key, value), wanted[:2], wanted[2:], strict=True):
        rows, scales = quantize_rows_reference(new) if scale is not None else (new, None)
        for row in range(2):
            for token in range(3):
                at = length[row % len(length)] - 3 + token
                if 0 <= at < 10:
                    store[row, :, at] = rows[row, :, token]
                    if scale is not None:
                        scale[row, :, at] = scales[row, :, token]
    for found, each in zip(stores, wanted, strict=True):
        assert each is None or torch.equal(found, each)


@FUNCTIONS
def test_values_that_are_not_finite_become_a_row_of_nan(functions: Any, device: torch.device) -> None:
    key, value = torch.randn(1, KV_HEADS, 3, D, device=device), torch.zeros(1, KV_HEADS, 3, D, device=device)
    key[0, 0, 1, 3], key[0, 1, 2, 0] = torch.nan, torch.inf
    stores = cache(torch.int8, device, B=1)
    functions.store_key_value(key, value, KeyValueStore(*stores, int32(3, device=device)))
    k, v, k_scale, v_scale = stores
    assert k_scale[0, :, :3].isnan().tolist() == [[False, True, False], [False, False, True]]
    assert not k[0, 0, 1].any()
    assert (v_scale[:, :, :3] == 1).all()
    assert not v[:, :, :3].any()


# The size of a head, its rotary part, heads; norms of queries and keys; whether pairs lie side by side, and whether
# angles are float32. 20 and 24 are no powers of 2, nor are 3 and 6.
VALUES = [
    (16, 16, (4, 2), None, False, False),
    (16, 8, (4, 2), None, True, False),
    (24, 24, (6, 1), None, True, True),
    (20, 12, (3, 3), ("rms", "head"), False, False),
    (16, 16, (4, 2), ("rms", "all"), True, False),
    (20, 20, (3, 1), ("rms_once", "all"), False, True),
    (24, 8, (4, 2), ("rms_plus_one", "head"), False, False),
    (16, 16, (4, 2), ("layer", "own"), True, True),
    (20, 20, (3, 3), ("layer", "all"), False, False),
]


@pytest.mark.slow(quick=["dtype0-16"])
@DTYPES
@pytest.mark.parametrize(("size", "rotary", "heads", "norm", "interleaved", "in_float32"), VALUES)
def test_values(
    size: int, rotary: int, heads: tuple[int, int], norm: tuple[str, str] | None, interleaved: bool, in_float32: bool,
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    B, S = 2, 1
    kind, over = norm or ("rms", "")
    widths = {"head": lambda n: (size,), "own": lambda n: (n, size), "all": lambda n: (n * size,)}
    weights = [torch.randn(widths[over](n), device=device).to(dtype) if over else None for n in heads]
    qkv = torch.randn(B, S, (heads[0] + 2 * heads[1]) * size, device=device).to(dtype)
    angle = torch.rand(B, S, rotary // 2, device=device) * 6
    turns = [x.float() if in_float32 else x.to(dtype) for x in (angle.cos(), angle.sin())]
    given = RotaryCall(qkv, *turns, *weights, kind, 1e-6, *heads, interleaved)
    rounding = given._replace(cos=turns[0].to(dtype), sin=turns[1].to(dtype), in_float=True)
    in_float = rounding._replace(cos=rounding.cos.float(), sin=rounding.sin.float(), in_float=False)
    assert all(map(torch.equal, launcher.rotate(rounding), launcher.rotate(in_float)))
    assert all(map(torch.equal, rotate_reference(rounding), rotate_reference(in_float)))
    for ours, theirs in zip(launcher.rotate(given), rotate_reference(given), strict=True):
        assert ours.dtype == dtype
        if norm is None:
            assert torch.equal(ours, theirs)
        else:
            # The sums of a norm may be in another order: a step of the dtype, at each of its roundings.
            error = (ours.double() - theirs.double()).abs().max()
            assert error <= 3 * torch.finfo(dtype).eps * theirs.double().abs().max()


@pytest.mark.parametrize("kind", ["rms_once", "layer"])
@pytest.mark.parametrize(("heads", "values"), [((4, 2), "normalized"), ((3, 3), "of keys"), ((4, 0), "plain")])
def test_where_values_come_from(heads: tuple[int, int], values: str, kind: str, device: torch.device) -> None:
    """Gemma 4's: normalized without a weight, of keys before their norm, or another layer's with the keys."""
    qkv, cos, sin, *weights = arguments(torch.bfloat16, device)[:5]
    count = heads[0] + (1 if values == "of keys" else 2) * heads[1]
    part = qkv[..., : count * D]
    given = RotaryCall(part, cos, sin, *weights, kind, 1e-6, *heads, False, values)
    found, wanted = launcher.rotate(given), rotate_reference(given)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    assert found[1].shape == found[2].shape == (2, heads[1], 3, D)
    if values != "plain":
        source = part.unflatten(-1, (-1, D))[:, :, heads[0] :][:, :, -heads[1] :].transpose(1, 2).float()
        mean = source.mean(-1, keepdim=True) if kind == "layer" else 0.0
        plain = (source - mean) / ((source - mean).square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(found[2].float(), plain, rtol=0.01, atol=0.01)


def test_queries_keys_and_values_by_head(device: torch.device) -> None:
    """GPT-NeoX's: as those in turn."""
    given = arguments(torch.bfloat16, device)._replace(kv_heads=HEADS)
    qkv = torch.randn(2, 3, 3, HEADS, D, device=device).bfloat16()
    given = given._replace(qkv=qkv.flatten(2))
    by_head = given._replace(qkv=qkv.transpose(2, 3).flatten(2), layout="by head")
    assert all(map(torch.equal, launcher.rotate(by_head), launcher.rotate(given)))
    assert all(map(torch.equal, rotate_reference(by_head), rotate_reference(given)))


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("rows", [0, 1, 2])  # of positions
def test_factors_of_queries(rows: int, scale: float, dtype: torch.dtype, device: torch.device) -> None:
    """Ministral 3's by position, and OPT's."""
    qkv, cos, sin, *_ = arguments(dtype, device)
    plain = RotaryCall(qkv, cos, sin, None, None, "rms", 1e-6, HEADS, KV_HEADS, False)
    positions = torch.tensor([[0, 15, 16], [17, 100, 131_071]], device=device)[:rows] if rows else None
    given = plain._replace(scale=scale, period=16.0, growth=0.1, positions=positions)
    q, k, v = rotate_reference(plain)
    if positions is not None:
        factors = 1 + 0.1 * (1 + (positions / 16).floor()).log()
        q = q * factors[:, :, None, None].to(dtype)
    q = q if scale == 1.0 else q * scale
    eps = 0.0 if dtype != torch.float32 else 2e-7  # of a logarithm
    for found in (rotate_reference(given), launcher.rotate(given)):
        torch.testing.assert_close(found[0], q, rtol=eps, atol=0.0)
        assert torch.equal(found[1], k)
        assert torch.equal(found[2], v)


def test_queries_with_gates(device: torch.device) -> None:
    """Qwen3.5's: as those without them."""
    given = arguments(torch.bfloat16, device)
    q, rest = given.qkv.split([HEADS * D, 2 * KV_HEADS * D], -1)
    gate = torch.full_like(q, torch.nan)
    gated = torch.stack((q.unflatten(-1, (-1, D)), gate.unflatten(-1, (-1, D))), -2).flatten(-3)
    call = given._replace(qkv=torch.cat((gated, rest), -1), layout="gated")
    assert all(map(torch.equal, launcher.rotate(call), launcher.rotate(given)))
    assert all(map(torch.equal, rotate_reference(call), rotate_reference(given)))


@pytest.mark.parametrize("rotated", [False, True])
def test_neither_norm_nor_angles(rotated: bool, device: torch.device) -> None:
    qkv, cos, sin, q_weight, _, *rest = arguments(torch.bfloat16, device, B=1, S=2)
    turns = (cos, sin) if rotated else (None, None)
    # A norm of the queries alone.
    for weight in (None, q_weight):
        given = RotaryCall(qkv, *turns, weight, None, *rest)
        wanted, found = rotate_reference(given), launcher.rotate(given)
        assert torch.equal(found[1], wanted[1])
        assert torch.equal(found[2], wanted[2])
        torch.testing.assert_close(found[0], wanted[0], rtol=0.02, atol=0.02)


def test_programs_have_more_heads_where_there_are_more_tokens() -> None:
    for limits in (A100, H200):
        chosen = [launcher.heads_of_program(tokens, 32, 8, 128, limits) for tokens in (1, 16, 64, 16_384)]
        assert chosen == sorted(chosen)
        assert (chosen[0], chosen[-1]) == (1, 8)
        assert launcher.heads_of_program(16_384, 8, 1, 256, limits) == 1


@FUNCTIONS
@DTYPES
def test_strides(dtype: torch.dtype, functions: Any, device: torch.device) -> None:
    # A product of few rows may be a part of a larger one; angles are a half of what the model computes.
    qkv, cos, sin, *rest = arguments(dtype, device)
    wide = torch.randn(2, 6, 2 * qkv.shape[2], device=device).to(dtype)
    part = wide[:, ::2, 5 : 5 + qkv.shape[2]]
    part.copy_(qkv)
    whole = torch.cat((cos, cos), -1), torch.stack((sin, sin), -1).flatten(-2)
    found = functions.rotate(RotaryCall(part, whole[0][..., : D // 2], whole[1][..., ::2], *rest))
    for ours, wanted in zip(found, functions.rotate(RotaryCall(qkv, cos, sin, *rest)), strict=True):
        assert torch.equal(ours, wanted)
        assert ours.is_contiguous()


@FUNCTIONS
def test_a_cache_of_any_layout(functions: Any, device: torch.device) -> None:
    # Keys beside values, tokens before heads, as others lay them out.
    rotated = arguments(torch.float32, device)
    stores = torch.zeros(2, 10, 2, KV_HEADS, D, device=device)
    k, v = stores.permute(2, 0, 3, 1, 4).unbind()
    functions.rotate_and_store(rotated, KeyValueStore(k, v, None, None, int32(7, device=device)))
    _, key, value = functions.rotate(rotated)
    assert torch.equal(k[:, :, 4:7], key)
    assert torch.equal(v[:, :, 4:7], value)
    assert not stores[:, :4].any()


@FUNCTIONS
@pytest.mark.parametrize("S", [0, 1])
@pytest.mark.parametrize("B", [0, 1])
def test_nothing_to_do(B: int, S: int, functions: Any, device: torch.device) -> None:
    rotated = arguments(torch.bfloat16, device, B, S)
    q, k, v = functions.rotate(rotated)
    assert (q.shape, k.shape, v.shape) == ((B, S, HEADS, D), (B, KV_HEADS, S, D), (B, KV_HEADS, S, D))
    store = KeyValueStore(*cache(torch.int8, device, B), int32(4, device=device))
    assert functions.rotate_and_store(rotated, store).shape == q.shape


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (
            0,
            torch.zeros(2, 3, 128, dtype=torch.float64),
            "qkv is torch.float64; rotate accepts float16, bfloat16, float32",
        ),
        (0, torch.zeros(2, 3, 100), r"qkv is \[2, 3, 100\]; it must be \[B, S, heads \* D\], and 8 heads"),
        (1, torch.zeros(1, 3, 16), r"cos has 16 columns; .* at most 8 of a head of 16: pass one half, cos\[..., :8\]"),
        (1, torch.zeros(3, 3, 8), r"cos is \[3, 3, 8\]; it must be \[1 or 2, 3, R / 2\]"),
        (1, torch.zeros(1, 3, 4), "cos is .* and sin is .*: make them alike"),
        (1, torch.zeros(1, 3, 8, dtype=torch.float16), "cos is torch.float16; it must be torch.float32"),
        (2, None, "cos and sin go together: give both or none"),
        (3, torch.zeros(32), r"q_weight is \[32\]; it must be \[16\], \[4, 16\] or \[64\]"),
        (4, torch.zeros(16).half(), "k_weight is torch.float16; it must be torch.float32, as qkv"),
        (5, "l2", "norm is 'l2'"),
        (5, "layer_by_steps", "norm is 'layer_by_steps'; of queries and keys it must be one of"),
        (7, 3, "q_heads is 3 and kv_heads 2; both are from 1 on, the one a multiple of the other"),
        (10, "keys", "values is 'keys'; it must be one of"),
        (11, "by row", "layout is 'by row'; it must be one of"),
        (11, "by head", "q_heads is 4, kv_heads 2 and values 'plain'; by head, each query has a key and a value"),
        (
            16,
            torch.zeros(2, 2, dtype=torch.int64),
            r"positions is torch.int64 \[2, 2\]; it must be integers, \[1 or 2, 3\]",
        ),
        (16, torch.zeros(2, 3, dtype=torch.int64), "period is 0.0; with positions it must be positive"),
        (
            17,
            torch.zeros(2, 2, 10, 16, dtype=torch.int8),
            "k is torch.int8; a cache of torch.float32 without scales is",
        ),
        (18, torch.zeros(2, 2, 9, 16), r"k is \[2, 2, 10, 16\] and v is \[2, 2, 9, 16\]: they must be alike"),
        (18, torch.zeros(2, 3, 10, 16), r"v is \[2, 3, 10, 16\]; it must be \[2, 2, L, 16\]"),
        (18, torch.zeros(2, 2, 16, 10).mT, r"v has strides \(320, 160, 1, 10\); its last dimension must be contiguous"),
        (19, torch.zeros(2, 2, 10), "k_scale and v_scale go together"),
        (21, torch.zeros(1), r"length is torch.float32 \[1\]; it must be torch.int32 \[1\] or \[2\]"),
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


def test_keys_and_values_that_are_refused() -> None:
    key, store = torch.zeros(2, 2, 3, 16), cache(torch.float32, torch.device("cpu"))
    for keys, values, message in (
        (key.double(), key.double(), "key is torch.float64; a cache accepts float16, bfloat16, float32"),
        (key, key[..., 0], r"value is \[2, 2, 3\]; it must be \[B, kv_heads, S, D\]"),
        (key, key.half(), "and value is torch.float16 .*: they must be alike"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            torch.ops.qgemm.store_key_value(keys, values, *store, torch.tensor([4], dtype=torch.int32))


def test_a_cache_on_another_device_is_refused() -> None:
    device = torch.device("cpu")
    call, length = RotaryCall(*arguments(torch.float32, device)), int32(4, device=device)
    k, v, *scales = (x if x is None else x.to("meta") for x in cache(torch.float32, device))
    store = KeyValueStore(k, v, *scales, length.to("meta"))
    with pytest.raises(ValueError, match="qkv is on cpu but k is on meta: move them to one device"):
        dispatch.rotate_and_store(call, store)


@pytest.mark.parametrize("layout", ["once", "twice", "each twice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    positions = torch.tensor([[0, 1, 5], [100, 4095, 131_071]], device=device).t().contiguous().t()
    frequencies = (1e4 ** -torch.linspace(0, 1, 24)).to(device)
    found = launcher.rotary_angles(positions, frequencies, 1.25, layout, dtype)
    exact = positions.cpu()[..., None].float() * frequencies.cpu()
    exact = ANGLES[layout](exact).double()
    # Of an angle in float32, whose cosine is good to the last bits of that.
    bound = 2e-7 + torch.finfo(dtype).eps
    for ours, wanted in zip(found, (exact.cos(), exact.sin()), strict=True):
        assert ours.dtype == dtype
        assert (ours.cpu().double() - 1.25 * wanted).abs().max() <= 1.25 * bound
    for ours, wanted in zip(found, dispatch.rotary_angles(positions, frequencies, 1.25, layout, dtype), strict=True):
        torch.testing.assert_close(ours, wanted)
    empty, _ = launcher.rotary_angles(positions[:0], frequencies, 1.0, layout, dtype)
    assert empty.shape == (0, 3, 24 if layout == "once" else 48)


def test_angles_of_several_axes(device: torch.device) -> None:
    positions = torch.randint(9999, (3, 2, 5), device=device)
    axes = torch.tensor([0, 2, 1, 1, 0, 2], dtype=torch.int32, device=device)
    frequencies = torch.rand(6, device=device)
    found = launcher.rotary_angles(positions, frequencies, 1.0, "twice", torch.float32, axes)
    ours = dispatch.rotary_angles(positions, frequencies, 1.0, "twice", torch.float32, axes)
    for pair, axis in enumerate(axes.tolist()):
        given = (positions[axis], frequencies[pair : pair + 1], 1.0, "once", torch.float32)
        for each, wanted in zip(found, launcher.rotary_angles(*given), strict=True):
            assert torch.equal(each[..., pair :: len(axes)], wanted.expand(-1, -1, 2))
        for each, wanted in zip(ours, dispatch.rotary_angles(*given), strict=True):
            torch.testing.assert_close(each[..., pair :: len(axes)], wanted.expand(-1, -1, 2), rtol=0.0, atol=1e-6)


def test_arguments_of_angles() -> None:
    positions, frequencies = torch.zeros(1, 2, dtype=torch.int64), torch.ones(4)
    with pytest.raises(ValueError, match="layout is 'thrice'"):
        dispatch.rotary_angles(positions, frequencies, 1.0, "thrice", torch.float32)
    with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
        dispatch.rotary_angles(positions, frequencies, 1.0, "once", torch.int8)
    with pytest.raises(ValueError, match=r"positions is torch\.float32 \[1, 2\]; it must be integers, \[B, S\]"):
        dispatch.rotary_angles(positions.float(), frequencies, 1.0, "once", torch.float32)
    with pytest.raises(ValueError, match=r"frequencies is torch\.float32 \[1, 4\]"):
        dispatch.rotary_angles(positions, frequencies[None], 1.0, "once", torch.float32)
    axes = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"positions is torch\.int64 \[1, 2\]; it must be integers, \[A, B, S\] with"):
        dispatch.rotary_angles(positions, frequencies, 1.0, "once", torch.float32, axes)
    with pytest.raises(ValueError, match="axes"):
        dispatch.rotary_angles(positions[None], frequencies, 1.0, "once", torch.float32, axes[:3])
