"""``decode_attention``: the Triton kernels and the CPU function against ``reference.py`` and float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels import decode_attention, quantize_rows
from qgemm.kernels.attention import launcher
from qgemm.kernels.attention.call import AttentionCall
from qgemm.kernels.attention.checks import MAX_QUERIES
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.reference import decode_attention_reference
from tests.kernels.devices import H200


def kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    start: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    max_length: int | None = None,
) -> Tensor:
    """The kernels themselves (interpreted on a CPU)."""
    scale, max_length = scale or q.shape[-1] ** -0.5, max_length or k.shape[2]
    call = AttentionCall(q, k, v, k_scale, v_scale, length, start, sinks, scale, softcap, window, max_length)
    return launcher.decode_attention(call)


# And what a user's call runs.
FUNCTIONS = pytest.mark.parametrize("function", [kernels, decode_attention], ids=["kernels", "user"])
INT8 = pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])

Attention = Callable[..., Tensor]


def heads(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def cache(
    B: int, Hkv: int, L: int, D: int, dtype: torch.dtype, device: torch.device, int8: bool = False
) -> dict[str, Tensor]:
    """Keys and values of ``dtype``, or int8."""
    k, v = heads(B, Hkv, L, D, dtype=dtype, device=device), heads(B, Hkv, L, D, dtype=dtype, device=device)
    if not int8:
        return {"k": k, "v": v}
    (k, k_scale), (v, v_scale) = quantize_rows(k), quantize_rows(v)
    return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}


def ints(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def doubled(tensors: dict[str, Any]) -> dict[str, Any]:
    """What the reference computes in float64 with."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in tensors.items()
    }


def assert_accurate(function: Attention, **arguments: Any) -> Tensor:
    """The error against float64 is at most twice that of the reference, and what rounding the weights may add.

    They are rounded to the type of float values, or to float16 for int8 ones, for which queries are rounded too.
    """
    out = function(**arguments)
    q, v = arguments["q"], arguments["v"]
    assert out.is_contiguous()
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    options = {name: value for name, value in arguments.items() if name != "max_length"}
    exact = decode_attention_reference(**doubled(options))
    error_of_reference = (decode_attention_reference(**options).double() - exact).abs().max()
    v = v.abs() if v.dtype == torch.int8 else v.double().abs()
    magnitudes = decode_attention_reference(**doubled(options | {"v": v})).max()
    rounding = 2 * torch.finfo(torch.float16).eps if v.dtype == torch.int8 else torch.finfo(q.dtype).eps / 2
    assert (out.double() - exact).abs().max() <= 2 * error_of_reference + (rounding + 2.0**-22) * magnitudes
    return out


@FUNCTIONS
@DTYPES
@INT8
def test_dtypes(int8: bool, dtype: torch.dtype, function: Attention, device: torch.device) -> None:
    q = heads(2, 2, 8, 64, dtype=dtype, device=device)
    kept = cache(2, 2, 100, 64, dtype, device, int8)
    assert_accurate(function, q=q, **kept, length=ints(77, device=device))


@FUNCTIONS
@INT8
@pytest.mark.parametrize(
    ("B", "S", "Hq", "Hkv", "D", "L", "length"),
    [
        (1, 1, 4, 2, 64, 300, 290),  # many parts
        (2, 1, 3, 3, 80, 40, 40),  # as many heads of keys; D is no power of 2; the whole cache
        (1, 1, 2, 1, 16, 5, 1),  # one key
        (1, 3, 4, 1, 32, 200, 131),  # three new tokens
        (1, 16, 2, 1, 32, 70, 16),  # nothing before them
        (1, 1, 71, 1, 64, 40, 33),  # more rows of a head than a program takes
        (1, 1, 2, 2, 256, 40, 33),
        (1, 2, 4, 1, 512, 40, 33),  # Gemma 4's
        (20, 1, 2, 1, 32, 70, 70),  # as many heads as programs: no parts
    ],
)
def test_shapes(
    B: int, S: int, Hq: int, Hkv: int, D: int, L: int, length: int, int8: bool, function: Attention,
    device: torch.device,
) -> None:  # fmt: skip
    q = heads(B, S, Hq, D, dtype=torch.bfloat16, device=device)
    kept = cache(B, Hkv, L, D, torch.bfloat16, device, int8)
    assert_accurate(function, q=q, **kept, length=ints(length, device=device))


@FUNCTIONS
@INT8
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 20},
        {"window": 1},
        {"window": 1000},  # longer than the cache
        {"softcap": 2.0},
        {"scale": 0.7},
        {"sinks": True},
        {"start": True},
        {"start": True, "window": 50, "softcap": 5.0, "sinks": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options: dict[str, Any], S: int, int8: bool, function: Attention, device: torch.device) -> None:
    B, Hq, Hkv, D, L = 4, 2, 1, 32, 150
    q = heads(B, S, Hq, D, dtype=torch.bfloat16, device=device)
    # The second sequence is all padding, but for its newest token; the third has nothing but the new ones.
    options = options | ({"start": ints(70, 109, 0, 0, device=device)} if "start" in options else {})
    options |= {"sinks": torch.randn(Hq, device=device)} if "sinks" in options else {}
    length = ints(110, 110, S, 150, device=device)
    kept = cache(B, Hkv, L, D, torch.bfloat16, device, int8)
    assert_accurate(function, q=q, **kept, length=length, **options)


@FUNCTIONS
@INT8
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("S", [1, 2])
def test_a_query_that_sees_nothing_gives_zeros(
    S: int, sinks: bool, int8: bool, function: Attention, device: torch.device
) -> None:
    q = heads(3, S, 2, 32, dtype=torch.bfloat16, device=device)
    kept = cache(3, 1, 64, 32, torch.bfloat16, device, int8)
    length, start = ints(0, 40, 40, device=device), ints(0, 40, 39, device=device)
    sink = torch.zeros(2, device=device) if sinks else None
    out = function(q=q, **kept, length=length, start=start, sinks=sink)
    assert not out[:2].any()
    assert not out[2, :-1].any()
    assert out[2, -1].any(dim=-1).all()


@FUNCTIONS
@INT8
@pytest.mark.parametrize("S", [1, 2])
def test_only_visible_keys_count(S: int, int8: bool, function: Attention, device: torch.device) -> None:
    q = heads(2, S, 4, 32, dtype=torch.bfloat16, device=device)
    kept = cache(2, 2, 100, 32, torch.bfloat16, device, int8)
    use = {"length": ints(60, 50, device=device), "start": ints(7, 0, device=device), "window": 40}
    wanted = function(q=q, **kept, **use)
    names = ("k_scale", "v_scale") if int8 else ("k", "v")
    for name in names:
        kept[name] = kept[name].clone()
        for row, (first, end) in enumerate([(60 - S + 1 - 40, 60), (50 - S + 1 - 40, 50)]):
            kept[name][row, :, :first] = torch.nan
            kept[name][row, :, end:] = torch.inf
    assert torch.equal(function(q=q, **kept, **use), wanted)


@FUNCTIONS
@INT8
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_stays_in_its_row(name: str, int8: bool, function: Attention, device: torch.device) -> None:
    tensors = {"q": heads(2, 1, 4, 32, dtype=torch.bfloat16, device=device)}
    tensors |= cache(2, 2, 100, 32, torch.bfloat16, device, int8)
    where = f"{name}_scale" if int8 and name != "q" else name
    length = ints(70, device=device)
    clean = function(**tensors, length=length)
    # A head of q; one key of a head of k, whose two heads of q see it.
    tensors[where] = tensors[where].clone()
    tensors[where][(1, 0, 1) if name == "q" else (1, 0, 30)] = torch.nan
    out, bad = function(**tensors, length=length), torch.zeros(2, 1, 4, 1, dtype=torch.bool, device=device)
    bad[1, 0, 1] = True
    bad[1, 0, 0] = name != "q"
    assert torch.equal(out.isnan(), bad.expand(out.shape))
    assert torch.equal(out.nan_to_num(), clean.masked_fill(bad, 0.0))


@FUNCTIONS
def test_strides(function: Attention, device: torch.device) -> None:
    # Heads of q taken from a merged product, a cache whose tokens come before heads, and scales beside one another.
    B, Hq, Hkv, D, L = 2, 4, 2, 32, 50
    product = heads(B, 2, (Hq + 2 * Hkv) * D, dtype=torch.bfloat16, device=device)
    q = product[..., : Hq * D].unflatten(-1, (Hq, D))
    kept = cache(B, L, Hkv, D, torch.bfloat16, device, int8=True)
    kept = {name: value.transpose(1, 2) for name, value in kept.items()}
    assert_accurate(function, q=q, **kept, length=ints(41, device=device))
    backwards = q.flip(-1).mT.contiguous().mT
    assert_accurate(function, q=backwards, **kept, length=ints(41, device=device))


@FUNCTIONS
@INT8
def test_parts_without_keys_are_not_read(int8: bool, function: Attention, device: torch.device) -> None:
    q = heads(2, 1, 2, 32, dtype=torch.bfloat16, device=device)
    kept = cache(2, 1, 300, 32, torch.bfloat16, device, int8)
    use = {"q": q, **kept, "length": ints(20, 90, device=device)}
    wanted = function(**use)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        out = function(**use)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out, wanted)
    assert out.isfinite().all()


def test_one_plan_for_all_lengths(device: torch.device) -> None:
    q = heads(1, 1, 2, 32, dtype=torch.bfloat16, device=device)
    kept = cache(1, 1, 64, 32, torch.bfloat16, device)
    kernels(q, **kept, length=ints(1, device=device))
    before = len(plans)
    for length in (2, 33, 64):
        kernels(q, **kept, length=ints(length, device=device))
    assert len(plans) == before


@pytest.mark.parametrize(
    ("B", "Hkv", "max_length", "parts"),
    [
        (1, 8, 512, 8),  # a part has a block at least
        (1, 8, 16_384, 66),  # as many programs as are wanted
        (16, 8, 4096, 4),
        (64, 8, 4096, 1),
        (1000, 8, 4096, 1),
    ],
)
def test_parts_fill_the_device(B: int, Hkv: int, max_length: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "device_limits", lambda device: H200)
    q = torch.empty(B, 1, 4 * Hkv, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(B, Hkv, max_length, 128, dtype=torch.bfloat16, device="meta")
    length = torch.empty(1, dtype=torch.int32, device="meta")
    plan = launcher._make_plan(AttentionCall(q, k, k, None, None, length, None, None, 0.1, 0.0, 0, max_length))
    assert plan.parts == parts
    assert (plan.combine is None) == (parts == 1)


def test_an_empty_batch(device: torch.device) -> None:
    q = torch.empty(0, 1, 4, 32, device=device)
    kept = cache(0, 2, 10, 32, torch.float32, device)
    assert decode_attention(q, **kept, length=ints(3, device=device)).shape == q.shape


def test_what_is_refused(device: torch.device) -> None:
    q, length = heads(2, 1, 4, 32, dtype=torch.bfloat16, device=device), ints(3, device=device)
    kept, packed = (cache(2, 2, 10, 32, torch.bfloat16, device, int8) for int8 in (False, True))

    def refused(kind: type[Exception], message: str, **arguments: Any) -> None:
        with pytest.raises(kind, match=message):
            decode_attention(**({"q": q, **kept, "length": length} | arguments))

    refused(TypeError, "q is torch.float64", q=q.double())
    refused(ValueError, r"q is \[2, 4, 32\]", q=q[:, 0])
    refused(ValueError, "k and v must be", v=kept["v"][:, :, :5])
    refused(ValueError, "q has 3 heads and k has 2", q=q[:, :, :3])
    refused(ValueError, "17 positions", q=q.expand(2, MAX_QUERIES + 1, 4, 32))
    refused(TypeError, "k is torch.float32; it must be torch.bfloat16", k=kept["k"].float())
    refused(ValueError, "v has no scales: pass v_scale", v=packed["v"])
    refused(ValueError, "k is torch.bfloat16, which has none: omit k_scale", k_scale=packed["k_scale"])
    refused(ValueError, "v_scale is torch.float32", **(packed | {"v_scale": packed["v_scale"][:1]}))
    odd = packed | {"k": torch.empty(2, 2, 10, 33, dtype=torch.int8, device=device)[..., :32]}
    refused(ValueError, "D and strides must be even", **odd)
    refused(ValueError, "side by side", k=kept["k"].mT.contiguous().mT)
    refused(ValueError, r"length is torch.int64", length=length.long())
    refused(ValueError, r"start is torch.int32 \[3\]", start=ints(1, 2, 3, device=device))
    refused(ValueError, "sinks are", sinks=torch.zeros(2, device=device))
    refused(ValueError, "softcap is -1.0", softcap=-1.0)
    refused(ValueError, "window is -1", window=-1)
    refused(ValueError, "max_length is 11", max_length=11)
    wide = torch.empty(2, 1, 4, 513, dtype=torch.bfloat16, device=device)
    refused(ValueError, "heads of 513 values", q=wide, k=wide.transpose(1, 2), v=wide.transpose(1, 2))
