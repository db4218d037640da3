"""Checks of the arguments of attention to a cache, in the form of ``kernels/checks.py``."""

import torch
from torch import Tensor

from qgemm.kernels.attention.call import AttentionCall, PagedCall, StoreCall
from qgemm.kernels.checks import check_form, check_same_device, check_strided, conversion, names_of
from qgemm.numerics.formats import FLOAT_DTYPES, INT8

MAX_QUERIES = 16  # positions of a sequence that decode_attention accepts at a time
MAX_HEAD_SIZE = 512
_TAKES_MORE = "torch.nn.functional.scaled_dot_product_attention takes more"


def check_decode_attention(call: AttentionCall) -> None:
    """Raises if ``decode_attention`` doesn't accept it."""
    q, k, v, k_scale, v_scale, length, start, sinks, _, softcap, window, max_length = call
    if q.dtype not in FLOAT_DTYPES:
        raise TypeError(f"q is {q.dtype}; decode_attention accepts {names_of(FLOAT_DTYPES)}: {conversion(q)}")
    for name, tensor, shape in (("q", q, "[B, S, Hq, D]"), ("k", k, "[B, Hkv, L, D]"), ("v", v, "[B, Hkv, L, D]")):
        check_strided(name, tensor)
        if tensor.ndim != 4 or 0 in tensor.shape[1:]:
            raise ValueError(f"{name} is {list(tensor.shape)}; it must be {shape}, none of which is 0")
    (B, S, Hq, D), (Hkv, L) = q.shape, k.shape[1:3]
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}; k and v must be [{B}, Hkv, L, {D}], "
            "as q is [B, S, Hq, D]"
        )
    if S > MAX_QUERIES:
        raise ValueError(f"q has {S} positions; decode_attention takes {MAX_QUERIES} at most: {_TAKES_MORE}")
    _check_heads("decode_attention", Hq, Hkv, D)
    for name, tensor, values_scale in (("k", k, k_scale), ("v", v, v_scale)):
        _check_cached(name, tensor, values_scale, q.dtype)
    for name, index in (("length", length), ("start", start)):
        if index is not None and (index.dtype != torch.int32 or (index.shape != (B,) and index.shape != (1,))):
            raise ValueError(
                f"{name} is {index.dtype} {list(index.shape)}; it must be torch.int32 [{B}] (or [1]), a number of keys"
            )
    _check_scores(sinks, Hq, softcap, window)
    if not 0 < max_length <= L:
        raise ValueError(f"max_length is {max_length}; it must be from 1 to k's length, {L}")
    check_same_device(q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale, length=length, start=start, sinks=sinks)


def _check_heads(function: str, Hq: int, Hkv: int, D: int) -> None:
    if Hq % Hkv:
        raise ValueError(f"q has {Hq} heads and k has {Hkv}: q's must be a multiple of k's")
    if D > MAX_HEAD_SIZE:
        raise ValueError(f"q has heads of {D} values; {function} takes {MAX_HEAD_SIZE} at most: {_TAKES_MORE}")


def _check_cached(name: str, cached: Tensor, scale: Tensor | None, dtype: torch.dtype, of: str = "q") -> None:
    """``dtype``: the dtype of ``of``."""
    if cached.dtype not in (dtype, INT8.storage):
        raise TypeError(f"{name} is {cached.dtype}; it must be {dtype}, as {of} is, or {INT8.storage} with scales")
    if (scale is not None) != (cached.dtype == INT8.storage):
        wrong = "has no scales: pass" if scale is None else f"is {cached.dtype}, which has none: omit"
        raise ValueError(f"{name} {wrong} {name}_scale")
    if cached.dtype == INT8.storage and (cached.shape[-1] % 2 or any(stride % 2 for stride in cached.stride()[:-1])):
        raise ValueError(
            f"{name} is {list(cached.shape)} with strides {cached.stride()}; of int8 ones D and strides must be even"
        )
    if cached.stride(-1) != 1:
        raise ValueError(f"{name} has strides {cached.stride()}; the values of a head must lie side by side")
    check_form(f"{name}_scale", scale, (torch.float32,), cached.shape[:-1])


def _check_scores(sinks: Tensor | None, Hq: int, softcap: float, window: int) -> None:
    if sinks is not None and (sinks.dtype not in FLOAT_DTYPES or sinks.shape != (Hq,)):
        raise ValueError(f"sinks are {sinks.dtype} {list(sinks.shape)}; they must be floats [{Hq}], one for each head")
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"softcap is {softcap}; it must be 0, for none, or a positive number")
    if window < 0:
        raise ValueError(f"window is {window}; it must be 0, for none, or a number of keys")


def check_paged_attention(call: PagedCall) -> None:
    """Raises if ``paged_attention`` doesn't accept it."""
    q, k, v, k_scale, v_scale, query_starts, key_starts, pages, sinks, _, softcap, window, max_queries, max_keys = call
    if q.dtype not in FLOAT_DTYPES:
        raise TypeError(f"q is {q.dtype}; paged_attention accepts {names_of(FLOAT_DTYPES)}: {conversion(q)}")
    check_strided("q", q)
    if q.ndim != 3 or 0 in q.shape[1:]:
        raise ValueError(f"q is {list(q.shape)}; it must be [T, Hq, D], with heads that aren't empty")
    _check_starts("key_starts", key_starts)
    _check_pages(k, v, pages, len(key_starts) - 1)
    (_, Hq, D), Hkv = q.shape, k.shape[-2]
    if k.shape[-1] != D:
        raise ValueError(f"q has heads of {D} values and k and v of {k.shape[-1]}: they must be of one size")
    _check_heads("paged_attention", Hq, Hkv, D)
    for name, tensor, scale in (("k", k, k_scale), ("v", v, v_scale)):
        _check_cached(name, tensor, scale, q.dtype)
    _check_starts("query_starts", query_starts)
    if len(query_starts) != len(key_starts):
        raise ValueError(
            f"query_starts has {len(query_starts)} numbers and key_starts {len(key_starts)}: both must have one for "
            "each sequence, and one more"
        )
    _check_scores(sinks, Hq, softcap, window)
    if max_queries < 1:
        raise ValueError(f"max_queries is {max_queries}; it must be the most queries that a sequence has, at least 1")
    if max_keys < 1:
        raise ValueError(f"max_keys is {max_keys}; it must be the most keys that a sequence has, at least 1")
    starts = {"query_starts": query_starts, "key_starts": key_starts}
    check_same_device(q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale, **starts, pages=pages, sinks=sinks)


def check_store_in_pages(call: StoreCall) -> None:
    """Raises if ``store_in_pages`` doesn't accept it."""
    key, value, k, v, k_scale, v_scale, key_starts, pages = call
    if key_starts is not None:
        _check_starts("key_starts", key_starts)
    B = len(pages) if key_starts is None else len(key_starts) - 1
    _check_pages(k, v, pages, B)
    if (key_starts is None) != (pages.dtype == torch.int64):
        raise ValueError(f"pages is {pages.dtype}; it must be int64 without key_starts, or int32 with them")
    for name, new, cached, scale in (("key", key, k, k_scale), ("value", value, v, v_scale)):
        if new.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} is {new.dtype}; store_in_pages accepts {names_of(FLOAT_DTYPES)}")
        if new.ndim != 3 or new.shape[1:] != cached.shape[-2:] or len(new) < B:
            raise ValueError(f"{name} is {list(new.shape)}; it must be {[B, *cached.shape[-2:]]}, or have more rows")
        if new.dtype != key.dtype or new.stride(-1) != 1:
            raise ValueError(f"{name} is {new.dtype} with strides {new.stride()}; it must be {key.dtype}, the last 1")
        _check_cached(name[0], cached, scale, new.dtype, name)
    check_same_device(**call._asdict())


def _check_pages(k: Tensor, v: Tensor, pages: Tensor | None, B: int) -> None:
    """``B``: the number of sequences, each of which has a row of a table."""
    for name, tensor in (("k", k), ("v", v)):
        check_strided(name, tensor)
        if tensor.ndim not in (3, 4) or 0 in tensor.shape[1:]:
            raise ValueError(
                f"{name} is {list(tensor.shape)}; it must be [P, Hkv, D], or [pages, keys of a page, Hkv, D]"
            )
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the values of a head must lie side by side")
        if tensor.ndim == 4 and tensor.shape[1] * tensor.stride(1) >= 2**31:
            raise ValueError(f"{name} is {list(tensor.shape)}; a page must have fewer than 2^31 values")
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"k is {k.dtype} {list(k.shape)} and v {v.dtype} {list(v.shape)}: they must be alike")
    if pages is not None and pages.dtype == torch.int64:
        if pages.ndim != 1 or pages.stride(0) != 1:
            raise ValueError(
                f"pages is {pages.dtype} {list(pages.shape)}; places must be torch.int64 [N], side by side"
            )
    elif k.ndim == 4:
        fits = pages is not None and pages.dtype == torch.int32 and pages.ndim == 2 and len(pages) == B
        if pages is None or not fits or pages.stride(1) != 1 or (B and not pages.shape[1]):
            found = None if pages is None else f"{pages.dtype} {list(pages.shape)}"
            raise ValueError(
                f"pages is {found}; with k of {k.ndim} dimensions it must be torch.int32 [{B}, most pages], or places, "
                "torch.int64 [N]"
            )
    elif pages is not None:
        raise ValueError(f"pages is {pages.dtype} {list(pages.shape)}; it must be places, torch.int64 [N]")


def _check_starts(name: str, starts: Tensor) -> None:
    if starts.dtype != torch.int32 or starts.ndim != 1 or not len(starts) or starts.stride(0) != 1:
        raise ValueError(f"{name} is {starts.dtype} {list(starts.shape)}; it must be torch.int32 [B + 1], side by side")
