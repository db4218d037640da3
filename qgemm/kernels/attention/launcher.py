"""Launchers of ``decode_attention`` and ``paged_attention`` on GPU tensors, CPU tensors in Triton's interpreter.

One launch, or two. Shapes and the caller's bounds determine into how many parts the keys of a head are split; the
lengths on the device determine how large the parts are. So a CUDA graph works for every length, and a result has the
same bits every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qgemm.kernels.attention.call import AttentionCall, PagedCall, StoreCall
from qgemm.kernels.attention.checks import check_decode_attention, check_paged_attention, check_store_in_pages
from qgemm.kernels.attention.kernels import _attend_kernel, _combine_kernel
from qgemm.kernels.attention.paged_kernels import _attend_paged_kernel, _combine_paged_kernel, _store_kernel
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import MAX_ROWS_TO_OVERLAP, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.numerics.integers import cdiv, next_power_of_2

# Per program. Tensor cores multiply 16 rows, and sum over 16 keys; Hopper's larger instructions multiply 64 rows.
MIN_ROWS, MAX_ROWS, MAX_ROWS_HOPPER = 16, 32, 64
MIN_KEYS, MAX_KEYS, MAX_KEYS_AMD = 16, 128, 32
BLOCK_BYTES = 8192  # of keys
FEW_KEYS = 64
PROGRAMS_PER_SM = 4  # the number to aim for
MAX_COMBINED = 8192  # values at a time
COMBINED_BY_WARP = 1024  # by a single one; with more values, two are faster
# For prompts: BLOCK_R, BLOCK_N, num_warps and num_stages, by the maximum BLOCK_D for which registers suffice.
PROMPT_BLOCKS = {128: (64, 32, 4, 2), 256: (64, 32, 8, 2)}
PROMPT_BLOCKS_HOPPER = {128: (64, 64, 4, 3), 256: (64, 32, 8, 3)}


class Plan(NamedTuple):
    """The launches of calls of a kind."""

    attend: Launch
    combine: Launch | None
    """None if keys aren't split."""
    parts: int


class PagedPlan(NamedTuple):
    """The launches of calls of a kind: for sequences of few queries, and of many."""

    few: Plan
    many: Launch | None
    """None if no sequence has more than a few queries."""


def decode_attention(call: AttentionCall) -> Tensor:
    """``dispatch.decode_attention`` on a GPU. It checks its arguments itself."""
    q, tensors = call.q, call.tensors
    shapes = [t is None or (t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    kind = (decode_attention, *shapes, *call[len(tensors) :])
    plan: Plan | None = plans.get(kind)
    if plan is None:
        check_decode_attention(call)
        if not q.numel():
            return torch.empty_like(q, memory_format=torch.contiguous_format)
        if q.stride(-1) != 1:
            return decode_attention(call._replace(q=q.contiguous()))
        plan = plans.keep(kind, _make_plan(call))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.combine is None:
        plan.attend(*tensors, out, None, None)
        return out
    part_out, part_lse = _results_of_parts(q, plan.parts)
    plan.attend(*tensors, None, part_out, part_lse)
    plan.combine(part_out, part_lse, call.length, call.start, call.sinks, out)
    return out


def paged_attention(call: PagedCall) -> Tensor:
    """``dispatch.paged_attention`` on a GPU. It checks its arguments itself.

    The number of tokens and the bounds differ at almost every call, so plans use them rounded up to powers of 2.
    """
    q, k, v, _, _, query_starts, key_starts, pages, sinks, scale, softcap, window, max_queries, max_keys = call
    tokens, max_queries, max_keys = (next_power_of_2(each) for each in (max(1, len(q)), max_queries, max_keys))
    max_queries = min(max_queries, 2 * MIN_ROWS)  # more make no difference: few is less
    kind = (
        paged_attention, q.shape[1:], q.stride(), k.shape[1:], k.stride(), v.shape[1:], v.stride(),
        *[each is None or (each.shape[1:], each.stride()) for each in (call.k_scale, call.v_scale)],
        query_starts.shape, key_starts.shape,
        *[each is None or (each.dtype, each.device, each.ndim) for each in call.tensors],
        pages is None or pages.ndim == 1 or (pages.shape, pages.stride()),
        sinks is None or sinks.shape, scale, softcap, window, max_queries, tokens, max_keys,
    )  # fmt: skip
    plan: PagedPlan | None = plans.get(kind)
    if plan is None or min(call.max_queries, call.max_keys) < 1:
        check_paged_attention(call)
        if q.stride(-1) != 1:
            return paged_attention(call._replace(q=q.contiguous()))
        plan = plans.keep(kind, _make_paged_plan(call._replace(max_queries=max_queries, max_keys=max_keys), tokens))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel() or len(query_starts) < 2:
        return out
    attend, combine, parts = plan.few
    if plan.many is not None:
        plan.many(*call.tensors, out, None, None)
    if combine is None:
        attend(*call.tensors, out, None, None)
        return out
    part_out, part_lse = _results_of_parts(q, parts)
    attend(*call.tensors, None, part_out, part_lse)
    combine(part_out, part_lse, query_starts, key_starts, sinks, out)
    return out


def store_in_pages(call: StoreCall) -> None:
    """``dispatch.store_in_pages`` on a GPU. It checks its arguments itself."""
    key, value, k, v, k_scale, v_scale, key_starts, pages = call
    kind = (
        store_in_pages,
        *[each is None or (each.shape[1:], each.stride(), each.dtype, each.device) for each in call],
        len(key), len(value), len(pages), key_starts is None or len(key_starts),
    )  # fmt: skip
    launch: Launch | None = plans.get(kind)
    if launch is None:
        check_store_in_pages(call)
        (Hkv, D), page, limits = k.shape[-2:], k.shape[1] if k.ndim == 4 else 0, device_limits(k.device)
        strides = (*key.stride()[:2], *value.stride()[:2], *_strides(k, v, k_scale, v_scale), pages.stride(0))
        blocks = next_power_of_2(Hkv), next_power_of_2(D)
        launch = Launch(
            _store_kernel, len(pages), strides, (Hkv, D, page, *blocks, limits.pdl), num_warps=4, pdl=limits.pdl
        )
        plans.keep(kind, launch)
    if len(pages):
        launch(*call)


def _strides(k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> Iterator[int]:
    """For each tensor, the strides of pages (or 0), tokens and heads."""
    for cached, after in ((k, 1), (v, 1), (k_scale, 0), (v_scale, 0)):
        strides = () if cached is None else cached.stride()[: cached.ndim - after]
        yield from (0,) * (3 - len(strides)) + strides


def _results_of_parts(q: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Memory for ``parts`` results of each head of each token, and for their ``lse``."""
    rows = q.numel() // q.shape[-1] * parts
    part_out = torch.empty((rows, q.shape[-1]), dtype=torch.float32, device=q.device)
    return part_out, torch.empty((rows,), dtype=torch.float32, device=q.device)


def _make_plan(call: AttentionCall) -> Plan:
    q, k, v, k_scale, v_scale, length, start, _, scale, softcap, window, max_length = call
    (B, S, Hq, D), Hkv, limits = q.shape, k.shape[1], device_limits(q.device)
    group = Hq // Hkv
    block_d = max(32, next_power_of_2(D))  # int8 products sum over at least 32 values
    longest = min(max_length, window + S - 1) if window else max_length
    keys_per_sm = B * Hkv * longest // limits.num_sms
    block_r, block_n, warps, stages = _block(S * group, block_d, k.dtype, keys_per_sm, limits)
    heads = B * Hkv * cdiv(S * group, block_r)
    parts = _parts(heads, longest, block_n, limits)
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]]
    for each in (k_scale, v_scale):
        strides += (0, 0, 0) if each is None else each.stride()
    for each in (length, start):
        strides.append(0 if each is None or each.shape[0] == 1 else each.stride(0))
    next_early = limits.pdl and B * S <= MAX_ROWS_TO_OVERLAP
    attend = Launch(
        _attend_kernel, heads * parts, (parts, max_length, Hkv, *strides),
        (S, group, D, scale, softcap, window, parts > 1, block_r, block_n, block_d, limits.pdl, next_early),
        num_warps=warps, num_stages=stages, pdl=limits.pdl,
    )  # fmt: skip
    if parts == 1:
        return Plan(attend, None, 1)
    combined = min(next_power_of_2(parts), MAX_COMBINED // block_d)
    combine = Launch(
        _combine_kernel, B * S * Hq, (parts, max_length, Hkv, *strides[-2:]),
        (S, group, D, window, block_n, combined, block_d, limits.pdl, next_early),
        num_warps=_combining_warps(combined * block_d), pdl=limits.pdl,
    )  # fmt: skip
    return Plan(attend, combine, parts)


def _make_paged_plan(call: PagedCall, tokens: int) -> PagedPlan:
    """``tokens``: the maximum number."""
    q, k, v, k_scale, v_scale, query_starts, _, pages, _, scale, softcap, window, max_queries, max_keys = call
    (_, Hq, D), Hkv, limits = q.shape, k.shape[-2], device_limits(q.device)
    B, group, block_d = len(query_starts) - 1, Hq // Hkv, max(32, next_power_of_2(D))
    few = max(1, MIN_ROWS // group)
    page = k.shape[1] if k.ndim == 4 else 0
    strides = (*q.stride()[:2], *_strides(k, v, k_scale, v_scale), pages.stride(0) if pages is not None else 0)

    def attend(is_many: bool, parts: int, block: tuple[int, int, int, int], next_early: bool) -> Launch:
        block_r, block_n, warps, stages = block
        row_blocks = B + tokens * group // block_r if is_many else B * cdiv(few * group, block_r)
        return Launch(
            _attend_paged_kernel, row_blocks * Hkv * parts, (parts, B, Hkv, *strides),
            (few, is_many, group, D, scale, softcap, window, page, parts > 1, block_r, block_n, block_d, limits.pdl,
             next_early),
            num_warps=warps, num_stages=stages, pdl=limits.pdl,
        )  # fmt: skip

    many = None
    if max_queries > few:
        many = attend(True, 1, _prompt_block(tokens * group, block_d, k.dtype, limits), False)
    longest = min(max_keys, window + few - 1) if window else max_keys
    block = _block(few * group, block_d, k.dtype, B * Hkv * longest // limits.num_sms, limits)
    parts = _parts(max(1, B * Hkv * cdiv(few * group, block[0])), longest, block[1], limits)
    next_early = limits.pdl and many is None and B * few <= MAX_ROWS_TO_OVERLAP
    attend_few = attend(False, parts, block, next_early)
    if parts == 1:
        return PagedPlan(Plan(attend_few, None, 1), many)
    combined = min(next_power_of_2(parts), MAX_COMBINED // block_d)
    combine = Launch(
        _combine_paged_kernel, B * few * Hq, (parts, Hkv),
        (few, group, D, window, *block[:2], combined, block_d, limits.pdl, next_early),
        num_warps=_combining_warps(combined * block_d), pdl=limits.pdl,
    )  # fmt: skip
    return PagedPlan(Plan(attend_few, combine, parts), many)


def _prompt_block(rows: int, block_d: int, dtype: torch.dtype, limits: DeviceLimits) -> tuple[int, int, int, int]:
    """As ``_block``, for a prompt's queries, of which all heads of a group together have ``rows`` rows."""
    blocks = PROMPT_BLOCKS_HOPPER if limits.hopper else PROMPT_BLOCKS
    fit = [block for most, block in blocks.items() if block_d <= most]
    if not fit or dtype == torch.float32 or limits.warp_size == 64:
        return _block(rows, block_d, dtype, limits.num_sms * PROGRAMS_PER_SM * FEW_KEYS, limits)
    return fit[0]


def _block(
    rows: int, block_d: int, dtype: torch.dtype, keys_per_sm: int, limits: DeviceLimits
) -> tuple[int, int, int, int]:
    """``(BLOCK_R, BLOCK_N, num_warps, num_stages)`` for a head's ``rows`` and keys of ``dtype``.

    With up to ``FEW_KEYS`` keys per program, the program has a single, larger block of them and more warps. The limits
    are the largest sizes for which registers suffice.
    """
    few = keys_per_sm <= PROGRAMS_PER_SM * FEW_KEYS
    amd = limits.warp_size == 64
    most_rows = MAX_ROWS_HOPPER if limits.hopper and block_d <= 128 and dtype != torch.float32 else MAX_ROWS
    most_keys = MAX_KEYS
    if block_d > 256:
        most_rows = MIN_ROWS
    if amd:
        most_rows, most_keys = MIN_ROWS, MAX_KEYS_AMD
    elif dtype == torch.float32:  # no tensor core computes these products
        most_keys = MIN_KEYS
    block_r = min(max(MIN_ROWS, next_power_of_2(rows)), most_rows)
    block_n = BLOCK_BYTES // (block_d * dtype.itemsize)
    if few:
        block_n = min(2 * block_n, 2 * FEW_KEYS if keys_per_sm >= 2 * FEW_KEYS else FEW_KEYS)
    block_n = min(max(block_n, MIN_KEYS), most_keys)
    wide = few or block_r > MIN_ROWS or dtype == torch.float32
    if block_d > 256:
        return block_r, block_n, 8 if dtype == torch.float32 or few else 4, 1 if dtype == torch.float32 else 2
    return block_r, block_n, 4 if wide else 2, 2 if few or amd else 3


def _parts(heads: int, longest: int, block_n: int, limits: DeviceLimits) -> int:
    """The number of parts into which the keys of each of ``heads`` are split."""
    return max(1, min(limits.num_sms * PROGRAMS_PER_SM // heads, cdiv(longest, block_n)))


def _combining_warps(values: int) -> int:
    """The warps of a program that combines ``values`` at a time: the next kernel starts once all programs have."""
    return 1 if values <= COMBINED_BY_WARP else 2
