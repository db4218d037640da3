"""``paged_attention``: the Triton kernels and the CPU function against ``reference.py`` and float64."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels import decode_attention, paged_attention, store_in_pages
from qgemm.kernels.attention import launcher
from qgemm.kernels.attention.call import PagedCall, StoreCall
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.reference import paged_attention_reference, quantize_rows_reference
from tests.kernels.devices import H200


def kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_queries: int,
    max_keys: int,
    pages: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """The kernels themselves (interpreted on a CPU)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    starts = (query_starts, key_starts)
    call = PagedCall(q, k, v, k_scale, v_scale, *starts, pages, sinks, scale, softcap, window, max_queries, max_keys)
    return launcher.paged_attention(call)


def store_kernel(
    key: Tensor, value: Tensor, k: Tensor, v: Tensor, key_starts: Tensor | None, pages: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """The kernel itself."""
    launcher.store_in_pages(StoreCall(key, value, k, v, k_scale, v_scale, key_starts, pages))


# And what a user's call runs.
FUNCTIONS = pytest.mark.parametrize("function", [kernels, paged_attention], ids=["kernels", "user"])
PAGED = pytest.mark.parametrize("paged", [0, 1, 16], ids=["in order", "places", "pages"])
FEW_PAGED = pytest.mark.parametrize(
    "paged", [0, pytest.param(1, marks=pytest.mark.complete), 16], ids=["in order", "places", "pages"]
)
HEADS_FIRST = pytest.mark.parametrize("heads_first", [False, True], ids=["", "heads first"])
STORES = pytest.mark.parametrize("store", [store_kernel, store_in_pages], ids=["kernel", "user"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])

Attention = Callable[..., Tensor]


def starts(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)


def batch(
    queries: Sequence[int],
    keys: Sequence[int],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    Hq: int = 4,
    Hkv: int = 2,
    D: int = 32,
    paged: int = 1,
) -> dict[str, Any]:
    """Arguments for sequences of so many queries and keys.

    ``paged``: how many keys are together; what there is has twice as much room. 0: all, one sequence after the other.
    """
    N, pages = sum(keys), None
    q = torch.randn(sum(queries), Hq, D, device=device).to(dtype)
    room: tuple[int, ...] = (2 * N if paged else N,)
    if paged == 1:
        pages = torch.randperm(2 * N, device=device)[:N]
    elif paged:
        most = -(-max(keys) // paged) + 1
        room = (2 * most * len(keys), paged)
        free = torch.randperm(room[0], device=device)[: most * len(keys)]
        # Beyond a sequence's keys a row of the table may hold anything.
        used = torch.tensor([-(-count // paged) for count in keys], device=device)[:, None]
        pages = free.view(-1, most).masked_fill(torch.arange(most, device=device) >= used, -1).int()
    k, v = torch.randn(2, *room, Hkv, D, device=device).to(dtype)
    bounds = {"max_queries": max(queries), "max_keys": max(keys)}
    return {
        "q": q, "k": k, "v": v, "pages": pages,
        "query_starts": starts(queries, device), "key_starts": starts(keys, device), **bounds,
    }  # fmt: skip


def in_int8(given: dict[str, Any], heads_first: bool = False) -> dict[str, Any]:
    """The same with int8 keys and values. ``heads_first``: in a page, with its scales after them, as in batches."""
    found = dict(given)
    for name in ("k", "v"):
        numbers, scale = quantize_rows_reference(given[name])
        if heads_first and numbers.ndim == 4:
            P, keys, heads, D = numbers.shape
            held = torch.full((P, heads * keys * (D + 4) + 8), 77, dtype=torch.int8, device=scale.device)
            ends = heads * keys * D, heads * keys * (D + 4)
            moved = (
                held[:, : ends[0]].view(P, heads, keys, D).transpose(1, 2),
                held[:, ends[0] : ends[1]].view(torch.float32).unflatten(1, (heads, keys)).transpose(1, 2),
            )
            for each, values in zip(moved, (numbers, scale), strict=True):
                each.copy_(values)
            numbers, scale = moved
        found |= {name: numbers, f"{name}_scale": scale}
    return found


def assert_accurate(function: Attention, **arguments: Any) -> Tensor:
    """The error against float64 is at most twice that of the reference, and what rounding the weights may add."""
    out = function(**arguments)
    q, v = arguments["q"], arguments["v"]
    assert out.is_contiguous()
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    options = {name: value for name, value in arguments.items() if not name.startswith("max_")}
    doubled = options | {name: options[name].double() for name in ("q", "k", "v") if options[name].is_floating_point()}
    doubled |= {"q": q.double()}
    exact = paged_attention_reference(**doubled)
    error_of_reference = (paged_attention_reference(**options).double() - exact).abs().max()
    magnitudes = paged_attention_reference(**doubled | {"v": v.double().abs()}).max()
    rounding = torch.finfo(q.dtype).eps / 2
    if "k_scale" in arguments:  # weights are float16, queries have 16 bits
        rounding = max(rounding, 2.0**-11)
    assert (out.double() - exact).abs().max() <= 2 * error_of_reference + (rounding + 2.0**-22) * magnitudes
    return out


@FUNCTIONS
@DTYPES
@PAGED
def test_dtypes(paged: int, dtype: torch.dtype, function: Attention, device: torch.device) -> None:
    assert_accurate(function, **batch([1, 3, 20], [40, 60, 20], device, dtype, paged=paged))


@FUNCTIONS
@FEW_PAGED
@pytest.mark.parametrize(
    ("queries", "keys", "Hq", "Hkv", "D"),
    [
        ([1, 1, 1], [300, 5, 1], 4, 2, 64),  # decoding: many parts, few, one key
        ([1], [200], 3, 3, 80),  # as many heads of keys; D is no power of 2
        ([70], [70], 4, 1, 32),  # a prompt: more rows than a program takes
        ([33, 0, 1, 0], [150, 0, 90, 0], 8, 2, 32),  # a part of a prompt, sequences with nothing, a new token
        ([0, 16, 16, 17, 1, 33, 9], [0, 16, 40, 17, 3, 70, 9], 4, 1, 32),  # blocks that are full, or hold a row more
        ([2, 1], [40, 33], 71, 1, 64),  # more rows of one query than a program takes
        ([1, 4], [40, 33], 2, 2, 256),
        ([1, 2], [40, 33], 4, 1, 512),
        ([1] * 20, [70] * 20, 2, 1, 32),  # as many heads as programs: no parts
    ],
)
def test_shapes(
    queries: list[int], keys: list[int], Hq: int, Hkv: int, D: int, paged: int, function: Attention,
    device: torch.device,
) -> None:  # fmt: skip
    assert_accurate(function, **batch(queries, keys, device, Hq=Hq, Hkv=Hkv, D=D, paged=paged))


@FUNCTIONS
@pytest.mark.parametrize("queries", [[1, 1, 1], [3, 40, 1]], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 20},
        {"window": 1},
        {"window": 1000},  # longer than any sequence
        {"softcap": 2.0},
        {"scale": 0.7},
        {"sinks": True},
        {"window": 50, "softcap": 5.0, "sinks": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options: dict[str, Any], queries: list[int], function: Attention, device: torch.device) -> None:
    if "sinks" in options:
        options = options | {"sinks": torch.randn(4, device=device)}
    assert_accurate(function, **batch(queries, [110, 150, 1], device), **options)


@FUNCTIONS
@FEW_PAGED
@HEADS_FIRST
@pytest.mark.parametrize("options", [{}, {"window": 30, "softcap": 5.0}], ids=["", "options"])
def test_int8(
    options: dict[str, Any], heads_first: bool, paged: int, function: Attention, device: torch.device
) -> None:
    given = batch([1, 3, 20, 0, 40], [90, 60, 20, 0, 70], device, Hq=6, Hkv=3, D=48, paged=paged)
    assert_accurate(function, **in_int8(given, heads_first), **options)


@FUNCTIONS
def test_bounds_may_be_larger(function: Attention, device: torch.device) -> None:
    """As in a CUDA graph, which is captured for as many sequences, queries and keys as there may be."""
    given = batch([1, 5, 0, 0], [30, 5, 0, 0], device)
    assert_accurate(function, **given | {"max_queries": 64, "max_keys": 4096})


@FUNCTIONS
def test_rows_beyond_the_sequences_change_nothing(function: Attention, device: torch.device) -> None:
    given = batch([1, 5], [30, 5], device)
    wanted = function(**given)
    more = given | {name: torch.cat([given[name], torch.full_like(given[name], torch.nan)]) for name in ("q", "k", "v")}
    more["pages"] = torch.cat([given["pages"], torch.full_like(given["pages"], 2**40)])
    assert torch.equal(function(**more)[:6], wanted)


@FUNCTIONS
@PAGED
def test_only_own_and_visible_keys_count(paged: int, function: Attention, device: torch.device) -> None:
    given = batch([1, 3], [60, 50], device, paged=paged)
    wanted = function(**given, window=20)
    place = torch.arange(110, device=device) if given["pages"] is None else given["pages"]
    if paged > 1:
        i = torch.arange(60, device=device)
        rows = [place[row, j // paged] * paged + j % paged for row, j in ((0, i), (1, i[:50]))]
        place = torch.cat(rows).long()
    seen = torch.cat([place[40:60], place[60 + 28 :]])
    for name in ("k", "v"):
        poisoned = torch.full_like(given[name], torch.nan)
        where = (seen // paged, seen % paged) if paged > 1 else seen
        poisoned[where] = given[name][where]
        given[name] = poisoned
    assert torch.equal(function(**given, window=20), wanted)


@FUNCTIONS
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_stays_in_its_row(name: str, function: Attention, device: torch.device) -> None:
    given = batch([1, 1], [70, 50], device)
    clean = function(**given)
    # A head of q; one key of a head of k, whose two heads of q see it.
    given[name] = given[name].clone()
    given[name][(1, 1) if name == "q" else (given["pages"][70 + 30], 0)] = torch.nan
    out, bad = function(**given), torch.zeros(2, 4, 1, dtype=torch.bool, device=device)
    bad[1, 1] = True
    bad[1, 0] = name != "q"
    assert torch.equal(out.isnan(), bad.expand(out.shape))
    assert torch.equal(out.nan_to_num(), clean.masked_fill(bad, 0.0))


@FUNCTIONS
def test_strides(function: Attention, device: torch.device) -> None:
    # Heads taken from a merged product, whose tokens come after heads once they are rotated.
    given = batch([5, 7], [5, 7], device, paged=0)
    for name in ("q", "k", "v"):
        given[name] = given[name].transpose(0, 1).contiguous().transpose(0, 1)
    assert_accurate(function, **given)
    given["q"] = given["q"].mT.contiguous().mT
    assert_accurate(function, **given)


@FUNCTIONS
def test_decoding_is_decode_attention(function: Attention, device: torch.device) -> None:
    """What continuous batching computes is what ``generate`` does."""
    given = batch([1, 1], [40, 33], device, torch.float32)
    k, v = torch.zeros(2, 2, 2, 40, 32, device=device)
    for row, places in enumerate([given["pages"][:40], given["pages"][40:]]):
        k[row, :, : len(places)] = given["k"][places].transpose(0, 1)
        v[row, :, : len(places)] = given["v"][places].transpose(0, 1)
    length = torch.tensor([40, 33], dtype=torch.int32, device=device)
    wanted = decode_attention(given["q"][:, None], k, v, length)[:, 0]
    torch.testing.assert_close(function(**given), wanted, atol=1e-6, rtol=1e-6)


@FUNCTIONS
def test_the_same_bits_every_time(function: Attention, device: torch.device) -> None:
    given = batch([1, 20, 1], [300, 60, 90], device)
    assert torch.equal(function(**given), function(**given))


def test_one_plan_for_all_lengths_up_to_a_power_of_two(device: torch.device) -> None:
    kernels(**batch([60, 1], [60, 64], device))
    before = len(plans)
    for queries, keys in (([33, 0], [33, 12]), ([20, 44], [64, 64])):
        kernels(**batch(queries, keys, device))
    assert len(plans) == before


@pytest.mark.parametrize(
    ("B", "max_queries", "max_keys", "parts"),
    [
        (1, 1, 512, 8),  # a part has a block at least
        (1, 1, 16_384, 66),  # as many programs as are wanted
        (16, 1, 4096, 4),
        (16, 512, 4096, 4),  # what is beside prompts, in a graph that is good for both
        (64, 1, 4096, 1),
    ],
)
def test_parts_fill_the_device(
    B: int, max_queries: int, max_keys: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "device_limits", lambda device: H200)
    q, k = (torch.empty(B, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    bounds = torch.empty(B + 1, dtype=torch.int32, device="meta")
    call = PagedCall(q, k, k, None, None, bounds, bounds, None, None, 0.1, 0.0, 0, max_queries, max_keys)
    plan = launcher._make_paged_plan(call, B)
    assert plan.few.parts == parts
    assert (plan.few.combine is None) == (parts == 1)
    assert (plan.many is None) == (max_queries == 1)


@FUNCTIONS
def test_nothing_to_do(function: Attention, device: torch.device) -> None:
    given = batch([0, 0], [0, 0], device, paged=0) | {"max_queries": 1, "max_keys": 1}
    assert function(**given).shape == (0, 4, 32)
    given |= {name: starts([], device) for name in ("query_starts", "key_starts")}
    assert function(**given).shape == (0, 4, 32)


def test_what_is_refused(device: torch.device) -> None:
    given = batch([1, 2], [5, 6], device)

    def refused(kind: type[Exception], message: str, **arguments: Any) -> None:
        for function in (paged_attention, kernels):
            with pytest.raises(kind, match=message):
                function(**(given | arguments))

    refused(TypeError, "q is torch.float64", q=given["q"].double())
    refused(ValueError, r"q is \[3, 128\]", q=given["q"].flatten(1))
    refused(ValueError, r"k is .* and v .*: they must be alike", v=given["v"][..., :5])
    refused(ValueError, "heads of 16 values and k and v of 32", q=given["q"][..., :16])
    refused(ValueError, "q has 3 heads and k has 2", q=given["q"][:, :3])
    refused(TypeError, "k is torch.float32; it must be torch.bfloat16", k=given["k"].float(), v=given["v"].float())
    refused(ValueError, "side by side", k=given["k"].mT.contiguous().mT)
    refused(ValueError, "query_starts is torch.int64", query_starts=given["query_starts"].long())
    refused(ValueError, "query_starts has 3 numbers and key_starts 2", key_starts=given["key_starts"][:2])
    refused(ValueError, "pages is torch.int32", pages=given["pages"].int())
    tables = batch([1, 2], [5, 6], device, paged=4)
    refused(ValueError, "pages is None; with k of 4 dimensions", k=tables["k"], v=tables["v"], pages=None)
    refused(ValueError, "places must be torch.int64", k=tables["k"], v=tables["v"], pages=tables["pages"].long())
    refused(ValueError, r"torch.int32 \[2, most pages\]", k=tables["k"], v=tables["v"], pages=tables["pages"][:1])
    long = torch.empty(1, 2**20, 4, 512, dtype=torch.bfloat16, device="meta")
    refused(ValueError, r"fewer than 2\^31", k=long, v=long, pages=tables["pages"])
    empty = tables["k"][:, :0]
    refused(ValueError, "keys of a page", k=empty, v=empty, pages=tables["pages"])
    refused(ValueError, "most pages", k=tables["k"], v=tables["v"], pages=tables["pages"][:, :0])
    refused(ValueError, "sinks are", sinks=torch.zeros(2, device=device))
    refused(ValueError, "softcap is -1.0", softcap=-1.0)
    refused(ValueError, "window is -1", window=-1)
    refused(ValueError, "max_queries is 0", max_queries=0)
    refused(ValueError, "max_keys is 0", max_keys=0)
    wide = torch.empty(3, 4, 513, dtype=torch.bfloat16, device=device)
    refused(ValueError, "heads of 513 values", q=wide, k=wide, v=wide)


@STORES
def test_new_keys_are_stored_in_their_pages(store: Callable[..., None], device: torch.device) -> None:
    given = batch([1, 1, 1, 1], [33, 1, 0, 16], device, Hkv=3, D=40, paged=16)
    k, v, pages, key_starts = (given[name] for name in ("k", "v", "pages", "key_starts"))
    # As rotated heads are: tokens after heads. One more than there are sequences.
    key, value = torch.randn(2, 3, 5, 40, device=device).bfloat16().transpose(1, 2)
    wanted_k, wanted_v = k.clone(), v.clone()
    for row, (page, place) in {0: (2, 0), 1: (0, 0), 3: (0, 15)}.items():
        wanted_k[pages[row, page], place], wanted_v[pages[row, page], place] = key[row], value[row]
    store(key, value, k, v, key_starts, pages)
    assert torch.equal(k, wanted_k)
    assert torch.equal(v, wanted_v)


@STORES
@HEADS_FIRST
def test_new_keys_are_stored_in_int8(heads_first: bool, store: Callable[..., None], device: torch.device) -> None:
    given = in_int8(batch([1, 1, 1], [33, 0, 16], device, Hkv=3, D=40, paged=16), heads_first)
    cached = {name: given[name] for name in ("k", "v", "k_scale", "v_scale")}
    key, value = torch.randn(2, 3, 3, 40, device=device).bfloat16()
    key[0, 1, 5] = torch.nan
    wanted = {name: each.clone() for name, each in cached.items()}
    for row, (page, place) in {0: (2, 0), 2: (0, 15)}.items():
        at = given["pages"][row, page], place
        for name, new in (("k", key), ("v", value)):
            wanted[name][at], wanted[f"{name}_scale"][at] = quantize_rows_reference(new[row])
    store(key, value, key_starts=given["key_starts"], pages=given["pages"], **cached)
    for name, each in cached.items():
        torch.testing.assert_close(each, wanted[name], rtol=0, atol=0, equal_nan=True)


def with_places(given: dict[str, Any]) -> dict[str, Any]:
    """The same pages, with a place for each key instead of tables."""
    size, pages = given["k"].shape[1], given["pages"]
    keys = [torch.arange(length, device=pages.device) for length in given["key_starts"].diff().tolist()]
    places = [pages[row, i // size] * size + i % size for row, i in enumerate(keys)]
    return given | {"pages": torch.cat(places).long()}


@FUNCTIONS
@pytest.mark.parametrize("is_int8", [False, True])
def test_places_in_pages(is_int8: bool, function: Attention, device: torch.device) -> None:
    given = batch([1, 20], [90, 33], device, paged=16)
    given = in_int8(given, heads_first=True) if is_int8 else given
    torch.testing.assert_close(function(**with_places(given)), function(**given), atol=0.01, rtol=0.01)
    assert_accurate(function, **with_places(given))
    for name in ("k", "v"):  # with gaps between pages
        given[name] = torch.stack([given[name], given[name]], dim=1)[:, 0]
    assert_accurate(function, **given)


@STORES
@pytest.mark.parametrize("paged", [1, 16], ids=["", "pages"])
@pytest.mark.parametrize("is_int8", [False, True])
def test_keys_are_stored_in_their_places(
    is_int8: bool, paged: int, store: Callable[..., None], device: torch.device
) -> None:
    given = batch([1], [30], device, Hkv=2, D=32, paged=paged)
    given = in_int8(given, heads_first=True) if is_int8 else given
    cached = {name: each for name, each in given.items() if name in ("k", "v", "k_scale", "v_scale")}
    # As rotated heads are, and one more than there are places.
    key, value = torch.randn(2, 2, 5, 32, device=device).bfloat16().transpose(1, 2)
    places = torch.tensor([7, 3, 59, 0], device=device)
    wanted = {name: each.clone() for name, each in cached.items()}
    at = places if paged == 1 else (places // paged, places % paged)
    for name, new in (("k", key), ("v", value)):
        if is_int8:
            wanted[name][at], wanted[f"{name}_scale"][at] = quantize_rows_reference(new[:4])
        else:
            wanted[name][at] = new[:4]
    store(key, value, key_starts=None, pages=places, **cached)
    for name, each in cached.items():
        assert torch.equal(each, wanted[name])


def test_what_is_not_stored(device: torch.device) -> None:
    given = batch([1, 1], [33, 5], device, paged=16)
    given = {name: given[name] for name in ("k", "v", "key_starts", "pages")}
    new = {"key": torch.randn(2, 2, 32, device=device).bfloat16(), "value": torch.randn(2, 2, 32, device=device)}
    for store in (store_kernel, store_in_pages):
        with pytest.raises(ValueError, match=r"value is torch\.float32"):
            store(**new, **given)
        with pytest.raises(ValueError, match=r"key is \[1, 2, 32\]; it must be \[2, 2, 32\]"):
            store(**new | {"key": new["key"][:1]}, **given)
        with pytest.raises(ValueError, match="must be places"):
            store(**new, **given | {name: given[name].flatten(0, 1) for name in ("k", "v")})
        with pytest.raises(ValueError, match="int32 with them"):
            store(**new, **given | {"pages": torch.arange(2, device=device)})
