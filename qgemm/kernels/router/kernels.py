"""Routing: a token's experts and weights from its logits, in one kernel; and another for the logits of few tokens.

A warp has the logits of a token in registers. For each expert to choose, it finds the maximum, of integers that are
ordered like the floats, and the lowest index that has it. On NVIDIA GPUs from sm_80 on, each of these is one
instruction. So of equal experts the first is chosen, and NaN is the largest value, as in PyTorch.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.epilogue import rounded
from qgemm.kernels.stages.order import ordered
from qgemm.kernels.stages.rows import StridedRow, load_blocks


@triton.jit(do_not_specialize=["T"])
def _router_logits_kernel(
    x, weight, bias, out,
    T, E, K, stride_xt, stride_we,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program has an expert and ``TOKENS`` of the ``T`` tokens: ``out[t, e] = x[t] . weight[e] + bias[e]``.

    The expert's row, in ``BLOCKS`` blocks, is read before the program waits for the preceding kernel, which doesn't
    write weights. ``PDL``, ``NEXT_EARLY``: as in ``_norm_kernel``.
    """
    if NEXT_EARLY:
        gdc_launch_dependents()
    expert, first = (tl.program_id(0) % E).to(tl.int64), tl.program_id(0) // E * TOKENS
    offsets = tl.arange(0, BLOCK)
    weights = load_blocks(StridedRow(weight + expert * stride_we, K, 1), offsets, BLOCKS)
    if PDL:
        gdc_wait()
    for i in tl.static_range(TOKENS):
        token = (first + i).to(tl.int64)
        if token < T:
            blocks = load_blocks(StridedRow(x + token * stride_xt, K, 1), offsets, BLOCKS)
            products = tl.zeros((BLOCK,), dtype=tl.float32)
            for j in tl.static_range(BLOCKS):
                products = tl.math.fma(blocks[j].to(tl.float32), weights[j].to(tl.float32), products)
            total = tl.sum(products, axis=0)
            if bias is not None:
                total += tl.load(bias + expert).to(tl.float32)
            tl.store(out + token * E + expert, rounded(total, out.dtype.element_ty))


@triton.jit
def _softmax(x):
    """The softmax of a vector. Entries that don't exist must be -inf."""
    e = tl.exp(x - tl.max(x, axis=0))
    # A NaN that the maximum has ignored is still in the sum.
    return e / tl.sum(e, axis=0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _of_near(x, left, largest, MARGIN: tl.constexpr, dtype: tl.constexpr):
    """The weight of ``largest`` in the softmax of those ``x`` that are ``left`` (``ordered``) and near it."""
    below = rounded(largest - x, dtype).to(tl.float32)
    magnitude = tl.abs(x)
    factor = tl.where(magnitude < largest, largest, magnitude)
    distance = rounded(tl.math.div_rn(below, factor), dtype).to(tl.float32)
    margin = rounded(tl.full(x.shape, MARGIN, tl.float32), dtype).to(tl.float32)
    near = (left > -0x7F800001) & ~(distance > margin)  # ordered(-inf)
    return 1.0 / tl.sum(tl.where(near, tl.exp(x - largest), 0.0), axis=0)


@triton.jit
def _route_kernel(
    logits, bias, weights, index,
    E, stride_t, stride_e,
    TOP_K: tl.constexpr, KIND: tl.constexpr, NORMALIZED: tl.constexpr,
    SCALE: tl.constexpr, FLOOR: tl.constexpr, GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr,
    OFFSET: tl.constexpr, ROUNDED: tl.constexpr, MARGIN: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program has a token. ``KIND`` to ``MARGIN``: the fields of a ``Routing``. ``bias``: for the choice, or None.

    ``BLOCK``, ``SLOTS``: powers of 2, at least ``E`` and ``TOP_K``. With groups, ``BLOCK`` is ``E``.
    """
    if PDL:
        gdc_wait()
    if NEXT_EARLY:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    experts, slots = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    x = tl.load(logits + token * stride_t + experts * stride_e, mask=experts < E, other=float("-inf")).to(tl.float32)
    values = x
    if KIND == "softmax":
        values = _softmax(x)
    elif KIND == "sigmoid":
        values = _sigmoid(x)
    if ROUNDED:
        values = rounded(values, logits.dtype.element_ty).to(tl.float32)
    choice = values
    if bias is not None:
        choice += tl.load(bias + experts, mask=experts < E, other=0.0).to(tl.float32)
        if ROUNDED and bias.dtype.element_ty == logits.dtype.element_ty:
            choice = rounded(choice, logits.dtype.element_ty).to(tl.float32)
    # Entries beyond the experts are never larger than an expert, and come after all of them.
    left = ordered(tl.where(experts < E, choice, float("-inf")))
    if KEPT_GROUPS < GROUPS:
        left = _in_kept_groups(left, GROUPS, KEPT_GROUPS)
    chosen = tl.full((SLOTS,), float("-inf"), tl.float32)
    found = tl.zeros((SLOTS,), tl.int32)
    for j in range(TOP_K):
        largest = tl.max(left, axis=0)
        expert = tl.min(tl.where(left == largest, experts, BLOCK), axis=0)
        if bias is None and KEPT_GROUPS == GROUPS:
            value = _float(largest)
        else:
            value = tl.sum(tl.where(experts == expert, values, 0.0), axis=0)
        if KIND == "sparsemixer":
            value = _of_near(x, left, _float(largest), MARGIN, logits.dtype.element_ty)
        chosen = tl.where(slots == j, value, chosen)
        found = tl.where(slots == j, expert, found)
        left = tl.where(experts == expert, -0x80000000, left)  # below every float
    if KIND == "softmax_of_top_k":
        chosen = _softmax(chosen)
    elif KIND == "sigmoid_of_top_k":
        chosen = _sigmoid(chosen)
    elif KIND != "sparsemixer" and NORMALIZED:
        total = tl.sum(tl.where(slots < TOP_K, chosen, 0.0), axis=0)
        if ROUNDED:
            total = rounded(total, logits.dtype.element_ty).to(tl.float32)
        total += OFFSET
        if ROUNDED:
            total = rounded(total, logits.dtype.element_ty).to(tl.float32)
            chosen = tl.math.div_rn(chosen, tl.where(slots < TOP_K, total, 1.0))
            chosen = rounded(chosen, logits.dtype.element_ty).to(tl.float32)
        else:
            chosen = chosen / tl.where(total < FLOOR, FLOOR, total)
    chosen *= SCALE
    mask = slots < TOP_K
    tl.store(weights + token * TOP_K + slots, rounded(chosen, weights.dtype.element_ty), mask=mask)
    tl.store(index + token * TOP_K + slots, found.to(tl.int64), mask=mask)


@triton.jit
def _in_kept_groups(values, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """``ordered`` values; those outside the ``KEPT`` groups with the largest sums of their two largest become -inf."""
    SIZE: tl.constexpr = values.shape[0] // GROUPS
    parts = tl.reshape(values, (GROUPS, SIZE))
    places, groups = tl.arange(0, SIZE)[None, :], tl.arange(0, GROUPS)
    first = tl.max(parts, axis=1)
    place = tl.min(tl.where(parts == first[:, None], places, SIZE), axis=1)
    second = tl.max(tl.where(places == place[:, None], -0x80000000, parts), axis=1)
    left = ordered(_float(first) + _float(second))
    kept = groups < 0
    for _ in range(KEPT):
        group = tl.min(tl.where(left == tl.max(left, axis=0), groups, GROUPS), axis=0)
        kept = kept | (groups == group)
        left = tl.where(groups == group, -0x80000000, left)
    ruled_out: tl.constexpr = -0x7F800001  # ordered(-inf)
    return tl.reshape(tl.where(kept[:, None], parts, ruled_out), (GROUPS * SIZE,))


@triton.jit
def _float(integer):
    """The float that ``ordered`` made ``integer`` from."""
    value = (integer ^ ((integer >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(integer == 0x7FFFFFFF, float("nan"), value)
