"""Launcher of int4 layers with int8 activations on GPU tensors: quantizes rows and multiplies them by packed weights.

As in ``kernels/linear/launcher.py``, the first call of a kind leaves a plan behind. On Hopper, a layer of one row is
one launch. So are, outside of CUDA graphs, layers of up to ``MAX_FEW_ROWS`` rows, and small layers of more rows. All
others are two launches, which overlap. Partial sums of tiles that programs share lie behind the rows' scales.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from qgemm.kernels.launch import memory
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import ALIGNMENT, MAX_ROWS_TO_OVERLAP, Launch
from qgemm.kernels.launch.memory import CACHE_LINE_BYTES, COUNTS_BYTES
from qgemm.kernels.launch.plans import plans, remember
from qgemm.kernels.launch.steps import LaunchPlan, Names, Part, Step
from qgemm.kernels.linear.launcher import LinearPlan
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.weight_only.int8_config import BLOCK, Int8Config, Sizes, select_config
from qgemm.kernels.weight_only.int8_kernels import _int4_int8_kernel
from qgemm.numerics.integers import cdiv, next_power_of_2, round_up
from qgemm.numerics.packing import HALF

MAX_K = 1 << 17  # of Hopper's kernels: 16 * 8 * 127 * K must fit in an int32
GROUPS = (32, 64, HALF)  # of Hopper's kernels, besides one group per row
MIN_STEP = 16  # of the kernel for every GPU
MAX_OWN_ROW = 32_768  # values of a row that every program quantizes for itself

PARTS = ("counts", "q", "q_scale")
# The arguments of the launches.
PRODUCT = ("q", "weight", "out", "q_scale", "weight_scale", "zero_point", "bias", "residual")
ROW = ("x", "weight", "out", "weight_scale", "zero_point", "bias", "residual")
LAYER = ("x", "q", "q_scale", "weight", "out", "weight_scale", "zero_point", "bias", "residual", "q", "counts")
MANY_LAYER = (*LAYER[:-4], "step", *LAYER[-4:])


def weight_only_linear(
    x: Tensor,
    weight: ScaledWeight,
    residual: Tensor | None = None,
    config: Int8Config | None = None,
    recallable: bool = False,
) -> Tensor:
    """``dispatch.weight_only_linear`` with int8 activations. The columns of ``x`` are in the weight's order.

    ``config``: a config of Hopper's kernels that replaces the chosen one. ``recallable``: remember what was found out
    about the call for later calls.
    """
    recallable = recallable and (residual is None or residual.is_contiguous())
    residual = None if residual is None else residual.contiguous()
    tensors = [None if tensor is None else tensor.contiguous() for tensor in weight[:6]]
    weight = ScaledWeight._make((*tensors, *weight[6:]))
    values, scale, zero_point, _, _, bias, in_features, _, group_size, _, step = weight
    kind: tuple[object, ...] = (
        weight_only_linear,
        x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device(),
        values.shape, values.data_ptr() % ALIGNMENT == 0, scale.dtype, zero_point is None, step is None,
        None if bias is None else bias.dtype, residual is None, in_features, group_size, config,
    )  # fmt: skip
    plan: LinearPlan | None = plans.get(kind)
    if plan is None:
        plan = plans.keep(kind, _make_plan(x, weight, residual is not None, config))
    other, what = (zero_point, weight[6:10]) if step is None else (step, (*weight[6:10], "step"))
    if recallable and plan.aligned:
        remember(plan.run, x, values, scale, bias, other, residual, what)
    out = plan.run(x, values, scale, bias, other, residual)
    assert out is not None  # for such a weight it is made
    return out


def _make_plan(x: Tensor, weight: ScaledWeight, has_residual: bool, config: Int8Config | None = None) -> LinearPlan:
    values, scale, zero_point, _, _, bias, K, _, group_size, _, step = weight
    N, M = values.shape[0], math.prod(x.shape[:-1])
    rows, out, device = x.reshape(M, K), x.new_empty((*x.shape[:-1], N)), x.device.index
    limits, group = device_limits(x.device), 0 if group_size >= K else group_size
    select = partial(select_config, M, N, K, group, limits, step is not None)
    if config is None and limits.hopper and _takes_hopper(N, K, group, values, zero_point is None, x.dtype):
        config = select()
    sizes = Sizes(M, N, K, scale.shape[1], group)
    two = one = _plan(device, sizes, config)
    is_one = is_row = False
    unshared = None
    if out.numel():
        names = _names(zero_point is not None, step is not None, bias is not None, has_residual)
        if config is None:
            first = quantize.plan_quantization(rows, None, next_early=M <= MAX_ROWS_TO_OVERLAP)
            steps = (
                names.step(first, "x", "q", "q_scale", "none", "none"),
                names.step(_launch(sizes, limits), *PRODUCT),
            )
            two = replace(two, steps=steps)
        else:
            from qgemm.kernels.weight_only import int8_hopper as hopper

            two = _two_launches(names, rows, sizes, config, limits)
            is_one = config.warps > 0 or hopper.many_in_one_launch(config, sizes, limits)
            is_row = config.warps > 0 and M == 1 and K <= MAX_OWN_ROW
            if is_one:
                one = replace(one, steps=(_one_launch(names, rows, sizes, is_row, config, limits),))
            if config.shared:
                unshared = _two_launches(names, rows, sizes, select(may_share=False), limits)
                if x.is_cuda:
                    memory.keep_graph_counts(x.get_device())
    return LinearPlan(
        device=device,
        one_of_several=torch.cuda.device_count() > 1,
        out_shape=tuple(out.shape),
        out_strides=out.stride(),
        aligned=values.data_ptr() % ALIGNMENT == 0,
        rows=None if rows.data_ptr() == x.data_ptr() else (M, K),
        residual_rows=None,
        q_bytes=two.parts[2].offset - COUNTS_BYTES,
        usual=one if is_one else two,
        captured=one if is_row else unshared or two,
        shares_buffer=is_one,
        counted=two if unshared is not None else None,
    )


def _plan(device: int | None, sizes: Sizes, config: Int8Config | None, steps: tuple[Step, ...] = ()) -> LaunchPlan:
    """A plan whose buffer has zeros to count in first, then the quantized rows, then their scales and partial sums."""
    # A block of K may extend beyond the last row; its weights there are 0.
    q_bytes = round_up(sizes.M * sizes.K + BLOCK, CACHE_LINE_BYTES)
    floats = sizes.partial_at + (0 if config is None else config.partial_sums(config.rows, config.cols))
    parts = (
        Part(0, (COUNTS_BYTES // 4,), torch.int32),
        Part(COUNTS_BYTES, (sizes.M, sizes.K), torch.int8),
        Part(COUNTS_BYTES + q_bytes, (floats,), torch.float32),
    )
    return LaunchPlan(device, COUNTS_BYTES + q_bytes + 4 * floats, parts, steps)


def _names(has_zeros: bool, has_steps: bool, has_bias: bool, has_residual: bool) -> Names:
    """The tensors of a call in the order of ``LinearPlan``'s.

    Zero points, or steps, take the place that a static input scale has in other layers.
    """
    other, missing = ("step", "zero_point") if has_steps else ("zero_point", "step")
    there = {other: has_zeros or has_steps, "bias": has_bias, "residual": has_residual}
    absent = {"none", missing, *(name for name, is_there in there.items() if not is_there)}
    return Names(("x", "weight", "weight_scale", "bias", other, "residual", "out", *PARTS, "none", missing), absent)


def _takes_hopper(N: int, K: int, group: int, weight: Tensor, symmetric: bool, dtype: torch.dtype) -> bool:
    """Whether Hopper's kernels accept such a layer."""
    from qgemm.kernels.gemm.launcher import has_hopper_kernel

    return (
        0 < K <= MAX_K
        and K % HALF == 0
        and (group in GROUPS or group == 0)
        # Beyond K, zeros minus a zero point aren't 0, so with zero points K must end with a block, or with groups,
        # whose scales are 0 beyond the last one.
        and (symmetric or group > 0 or K % BLOCK == 0)
        and dtype.itemsize == 2
        and N % 8 == 0
        and weight.data_ptr() % ALIGNMENT == 0
        and has_hopper_kernel()
    )


def _two_launches(names: Names, rows: Tensor, sizes: Sizes, config: Int8Config, limits: DeviceLimits) -> LaunchPlan:
    from qgemm.kernels.weight_only import int8_hopper as hopper

    plain = quantize.plan_quantization(rows, None, next_early=hopper.starts_early(sizes.M))
    first = names.step(plain, "x", "q", "q_scale", "none", "none")
    if config.warps:
        second = names.step(hopper.few_launch(config, sizes, limits), *PRODUCT)
    else:
        product = hopper.many_launch(config, sizes, rows.dtype, limits)
        step, counts = "step" if config.multiplies else "none", "counts" if config.shared else "none"
        second = names.step(product, *PRODUCT[:-2], step, *PRODUCT[-2:], counts)
    return _plan(rows.device.index, sizes, config, (first, second))


def _one_launch(
    names: Names, rows: Tensor, sizes: Sizes, is_row: bool, config: Int8Config, limits: DeviceLimits
) -> Step:
    from qgemm.kernels.weight_only import int8_hopper as hopper

    if is_row:
        return names.step(hopper.row_launch(config, sizes, rows.stride(1), limits), *ROW)
    if not config.warps:
        launch = hopper.many_layer_launch(config, sizes, rows.stride(), rows.dtype, limits)
        step = "step" if config.multiplies else "none"
        return names.step(launch, *(step if each == "step" else each for each in MANY_LAYER))
    return names.step(hopper.layer_launch(config, sizes, rows.stride(), limits), *LAYER)


def _launch(sizes: Sizes, limits: DeviceLimits) -> Launch:
    """The product by the kernel for every GPU."""
    M, N, K, G, group = sizes
    group = group or K
    block_m, block_n = min(max(next_power_of_2(M), 16), 64), 64
    step = 64 if G == 1 else max(math.gcd(group, 64), MIN_STEP)
    numbers = (M, N, K, G, cdiv(K, BLOCK) * HALF, group)
    constants = (block_m, block_n, step, G == 1 or group % step == 0, HALF, limits.pdl)
    # On sm_80 ptxas gives threads of 8 warps fewer registers than products in float16 of 16 rows take.
    warps = 4 if block_m == 16 and step < 32 and not limits.pdl else 8
    return Launch(
        _int4_int8_kernel, cdiv(M, block_m) * cdiv(N, block_n), numbers, constants, num_warps=warps, num_stages=2,
        pdl=limits.pdl,
    )  # fmt: skip
