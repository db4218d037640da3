"""Launcher of ``weight_only_linear`` with float rows on GPU tensors. Calls of a kind share the choice of kernels.

- Hopper, up to 32 rows: tiles that read the weight once (``_few_rows_ring_kernel``, or up to 16 rows
  ``_few_rows_kernel``). With more rows, or from 17 rows on where that is faster: tiles that unpack the weight between
  shared memory and the tensor cores (``_tiles_kernel``).
- Any other GPU, and what Hopper's kernels don't accept: plain Triton up to 64 rows; for more rows, the weight is
  dequantized for the call and PyTorch multiplies. Hopper's kernels don't accept float32, groups that aren't a multiple
  of 16, and K or strides that aren't a multiple of 16 bytes. Tiles don't accept small groups other than 16, 32 and 64,
  their scales if a row of them isn't a multiple of 4 bytes, and more than 768 or 2,048 rows where values are scaled in
  float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels.activations import GatedActivation, Gates
from qgemm.kernels.gemm.launcher import with_contiguous_columns
from qgemm.kernels.launch import memory
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.driver import DriverLaunch
from qgemm.kernels.launch.launch import ALIGNMENT, Launch, hooked
from qgemm.kernels.launch.plans import Run, plans, remember
from qgemm.kernels.launch.tensor_map import TensorMap
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.stages.activations import device_activation
from qgemm.kernels.stored_form import BLOCK_BYTES, VECTOR, WORD, StoredForm
from qgemm.kernels.weight_only import kernels
from qgemm.kernels.weight_only.config import (
    TILE_ROWS,
    FewRowsRing,
    Tiles,
    fits_ring,
    most_rows,
    prefers_tiles,
    select_ring,
    select_tiles,
)
from qgemm.kernels.weight_only.few_rows_config import MAX_FEW_ROWS, FewRows, select_few_rows
from qgemm.numerics.integers import cdiv, next_power_of_2

MAX_PLAIN_ROWS = 64  # for more rows, PyTorch's product with a float weight is faster
PLAIN_COLUMNS = 16
DEQUANTIZED_ROWS = 16
PANEL = 64  # columns of x that are copied at a time
SMALL_GROUPS = (16, 32, 64)  # of tiles
SCALE_BITS = torch.int8  # scales in e4m3; uint8 ones are exponents
MAX_KEPT_SUMS = 2**21  # float32 in memory that a stream keeps; with more, a product takes longer than an allocation


def weight_only_linear(
    x: Tensor, weight: ScaledWeight, residual: Tensor | None = None, recallable: bool = False
) -> Tensor:
    """``dispatch.weight_only_linear`` of checked arguments. The columns of ``x`` are in the weight's order.

    ``recallable``: remember what was found out about the call for later calls, unless a tensor had to be converted.
    """
    out = _compute(x, weight, residual, recallable, None)
    assert out is not None
    return out


def weight_only_activated(x: Tensor, weight: ScaledWeight, gates: Gates) -> Tensor | None:
    """``dispatch.weight_only_activated`` of checked arguments."""
    return _compute(x, weight, None, True, gates)


def _compute(
    x: Tensor, weight: ScaledWeight, residual: Tensor | None, recallable: bool, gates: Gates | None
) -> Tensor | None:
    """The product, or with ``gates`` the activated one; None if no kernel computes that."""
    bias, K, format, group_size = weight[5:9]
    values, scale, zero_point, global_scale = _with_contiguous_rows(weight)
    N = values.shape[0]
    out_shape = (*x.shape[:-1], N if gates is None else N // 2)
    rows = with_contiguous_columns(x.reshape(math.prod(x.shape[:-1]), K))
    added = None if residual is None else with_contiguous_columns(residual.reshape(rows.shape[0], N))
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    aligned = (rows.data_ptr() | values.data_ptr()) % ALIGNMENT == 0
    factors = scale.data_ptr() | (0 if zero_point is None else zero_point.data_ptr())
    kind = (
        weight_only_linear, gates, format, group_size, aligned, factors % WORD == 0, factors % ALIGNMENT == 0,
        x.get_device(),
        rows.shape, rows.stride(0), rows.dtype,
        values.shape, values.stride(0), values.dtype,
        scale.shape, scale.stride(0), scale.dtype,
        None if zero_point is None else zero_point.dtype, global_scale is not None,
        None if bias is None else bias.dtype, None if added is None else added.stride(0),
    )  # fmt: skip
    plan: Plan | None = plans.get(kind)
    if plan is None:
        plan = plans.keep(kind, _make_plan(rows, values, scale, zero_point, added, format, group_size, aligned, gates))
    what = weight[6:10] if gates is None else (*weight[6:10], gates)
    if plan is APART:
        other = weight.zero_point if weight.global_scale is None else weight.global_scale
        remember(_apart, x, weight.values, weight.scale, weight.bias, other, what=what)
        return None
    # Not where a float weight is made for the call.
    if recallable and plan.product is not None and plan.made is None and rows.data_ptr() == x.data_ptr():
        as_given = values is weight.values and scale is weight.scale and bias is weight.bias
        as_given = as_given and zero_point is weight.zero_point and global_scale is weight.global_scale
        if as_given and (residual is None or residual.is_contiguous()):
            other = zero_point if global_scale is None else global_scale
            run = plan.recalled(rows.shape, out_shape, global_scale is not None)
            remember(run, x, values, scale, bias, other, residual, what=what)
    return plan.run(rows, values, scale, zero_point, global_scale, bias, added).view(out_shape)


def float_weight(weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
    """``weight.dequantize(dtype)`` by one kernel, bit for bit, in the column order of ``values``; not in float64."""
    values, scale, zero_point, global_scale = _with_contiguous_rows(weight)
    values, scale = _as_bytes(values), _as_bytes(scale, SCALE_BITS)
    N, K = values.shape[0], weight.in_features
    out = values.new_empty((N, K), dtype=dtype)
    if out.numel():
        group = 0 if scale.shape[1] == 1 else weight.group_size
        form = StoredForm.of(weight.format, group, zero_point)
        kind = (
            float_weight, form, N, K, values.get_device(), values.dtype, values.stride(0), scale.dtype, scale.stride(0),
            None if zero_point is None else zero_point.dtype, global_scale is not None, dtype,
        )  # fmt: skip
        launch: Launch | None = plans.get(kind)
        if launch is None:
            launch = plans.keep(kind, _dequantize_launch(form, N, K, values.stride(0), scale.stride(0)))
        launch(values, scale, zero_point, global_scale, out)
    return out


def _as_bytes(values: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Values or scales as kernels read them: e4m3 as bytes of ``dtype``."""
    return values.view(dtype) if values.dtype == torch.float8_e4m3fn else values


def _with_contiguous_rows(weight: ScaledWeight) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Values, scales, zero points and global scale with contiguous columns, scales and zero points alike."""
    values, scale = with_contiguous_columns(weight.values), with_contiguous_columns(weight.scale)
    zero_point = weight.zero_point
    if zero_point is not None and zero_point.stride() != scale.stride():
        zero_point, scale = zero_point.contiguous(), scale.contiguous()
    return values, scale, zero_point, None if weight.global_scale is None else weight.global_scale.contiguous()


def _dequantize_launch(form: StoredForm, N: int, K: int, stride_wn: int, stride_sn: int) -> Launch:
    blocks = cdiv(K, form.block)
    return Launch(
        kernels._dequantize_kernel, cdiv(N, DEQUANTIZED_ROWS) * blocks, (N, K, stride_wn, stride_sn),
        (form, DEQUANTIZED_ROWS, blocks), 4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of calls of a kind. Each launch picks its own from the call's tensors."""

    shape: tuple[int, int]
    product: Launch | None
    """None if there is nothing to compute."""
    may_share: bool = False
    """Whether programs of its kernel may share tiles."""
    words: torch.dtype | None = None
    """The dtype that the product views the weight as, if not the stored one."""
    partial: int = 0
    """How many float32 sums programs that share tiles leave to one another."""
    made: tuple[int, int] | None = None
    """The shape of the float weight, if ``product`` only dequantizes."""

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        global_scale: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        """``[M, N]`` of ``x [M, K]``."""
        product = self.product
        if product is None:
            return x.new_empty(self.shape)
        if self.made is not None:
            float_weight = x.new_empty(self.made)
            product(_as_bytes(weight), _as_bytes(scale, SCALE_BITS), zero_point, global_scale, float_weight)
            out = F.linear(x, float_weight, None if bias is None else bias.to(x.dtype))
            return out if residual is None else out.add_(residual)
        device = x.device.index
        if x.is_cuda and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.run(x, weight, scale, zero_point, global_scale, bias, residual)
        out = _empty(x, self.shape, x.dtype)
        given: tuple[Tensor | None, ...] = x, weight, scale, zero_point, global_scale, bias, residual, out
        if product.aligned is None or hooked() or not self._run_by_driver(product.aligned, x, given):
            if self.partial:
                given = *given, _empty(x, (self.partial,), torch.float32), _counts(x)
            elif self.may_share:
                given = *given, None, None
            weight = _as_bytes(weight) if self.words is None else weight.view(self.words)
            product(x, weight, _as_bytes(scale, SCALE_BITS), *given[3:])
        return out

    def _run_by_driver(self, launch: DriverLaunch, x: Tensor, tensors: tuple[Tensor | None, ...]) -> bool:
        """Launches with addresses alone, if possible; returns whether it was."""
        addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
        merged = 0
        for address in addresses:
            merged |= address
        if merged % ALIGNMENT:
            return False
        device = x.get_device()
        stream = torch._C._cuda_getCurrentRawStream(device)
        if not self.partial:
            launch(stream, tuple(addresses))
        elif self.partial > MAX_KEPT_SUMS or _captured(stream):
            partial, counts = _empty(x, (self.partial,), torch.float32), _counts(x)
            launch(stream, (*addresses, partial.data_ptr(), counts.data_ptr()))
        else:
            kept = memory.stream_buffer(device, stream, memory.COUNTS_BYTES + 4 * self.partial).data_ptr()
            launch(stream, (*addresses, kept + memory.COUNTS_BYTES, kept))
        return True

    def recalled(self, rows: tuple[int, ...], out_shape: tuple[int, ...], has_unit: bool) -> Run:
        """A function for calls of the kind. It views x as ``rows``, and returns None if an argument isn't aligned.

        ``has_unit``: whether the tensor that only some layers have is the global scale, not zero points.
        """

        def run(
            x: Tensor,
            weight: Tensor,
            scale: Tensor,
            bias: Tensor | None,
            other: Tensor | None,
            residual: Tensor | None = None,
        ) -> Tensor | None:
            factors = scale.data_ptr() if other is None else scale.data_ptr() | other.data_ptr()
            if (x.data_ptr() | weight.data_ptr() | factors) % ALIGNMENT:
                return None
            if residual is not None and residual.ndim != 2:
                residual = residual.view(self.shape)
            zero_point, unit = (None, other) if has_unit else (other, None)
            out = self.run(x if x.ndim == 2 else x.view(rows), weight, scale, zero_point, unit, bias, residual)
            return out if out.shape == out_shape else out.view(out_shape)

        return run


APART = Plan((0, 0), None)
"""Of gates that no kernel activates."""


def _apart(*tensors: Tensor | None) -> None:
    """What a call of ``APART`` recalls."""


def _empty(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not x.is_cuda:
        return x.new_empty(shape, dtype=dtype)
    return memory.empty(shape, (shape[-1], 1)[-len(shape) :], dtype)


def _captured(stream: int) -> bool:
    """Whether the work of the current ``stream`` goes to a CUDA graph. That of the default stream, 0, never does."""
    return stream != 0 and memory.is_capturing()


def _counts(x: Tensor) -> Tensor:
    """``COUNTS_BYTES`` of zeros or more, for programs that share tiles."""
    if not x.is_cuda:
        return x.new_zeros(memory.COUNTS_BYTES, dtype=torch.int8)
    device = x.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    if not _captured(stream):
        return memory.stream_buffer(device, stream, memory.COUNTS_BYTES)
    counts = memory.graph_counts(device)
    if counts is None:  # in a graph, a kernel sets them to zero
        counts = torch.zeros(memory.COUNTS_BYTES // 4, dtype=torch.int32, device=x.device)
    return counts.view(torch.int8)


def _make_plan(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    residual: Tensor | None,
    format: str,
    group_size: int,
    aligned: bool,
    gates: Gates | None,
) -> Plan:
    (M, K), N = x.shape, weight.shape[0]
    limits = device_limits(x.device)
    if M * N == 0:
        return APART if gates else Plan((M, N), None)
    group = 0 if scale.shape[1] == 1 else group_size
    form = StoredForm.of(format, group, zero_point)
    strides = (x.stride(0), weight.stride(0), scale.stride(0), 0 if residual is None else residual.stride(0))
    if limits.hopper and aligned and _fits_hopper(form, x, weight):
        exact = scale.dtype == x.dtype or (scale.itemsize == 1 and x.dtype == torch.bfloat16)
        exact = exact and (not form.float_zeros or zero_point is None or zero_point.dtype == x.dtype)
        factors = [each for each in (scale, zero_point) if each is not None]
        precision = form.precision(exact, x.dtype == torch.bfloat16)
        fits_tiles = N % 8 == 0 and most_rows(form, precision) >= M and all(_fits_tiles(form, each) for each in factors)
        in_ring = fits_ring(M, K, form) and not (fits_tiles and prefers_tiles(M, N, K, form, limits))
        form = form.of_rows(K, scale, zero_point)
        if gates and (in_ring or M > MAX_FEW_ROWS):
            return APART
        if in_ring:
            ring = select_ring(M, N, K, form, limits)
            if ring.shared and x.is_cuda:
                memory.keep_graph_counts(x.get_device())
            return ring_plan(ring, form, M, N, K, strides, x.dtype, limits)
        if M <= MAX_FEW_ROWS:
            few_rows = select_few_rows(M, N, form, limits)
            few_rows = replace(few_rows, gated=gates is not None)
            return Plan((M, N // 2 if gates else N), few_rows_launch(few_rows, form, M, N, K, strides, limits, gates))
        if fits_tiles:
            config = select_tiles(M, N, K, form, limits, precision)
            if config.shared and x.is_cuda:
                memory.keep_graph_counts(x.get_device())
            return tiles_plan(config, form, M, N, K, strides, x.dtype, limits)
    if gates:
        return APART
    if M <= MAX_PLAIN_ROWS:
        return Plan((M, N), _plain_launch(form, M, N, K, strides, limits))
    return Plan((M, N), _dequantize_launch(form, N, K, *strides[1:3]), made=(N, K))


def _fits_hopper(form: StoredForm, x: Tensor, weight: Tensor) -> bool:
    if x.dtype not in (torch.float16, torch.bfloat16):
        return False
    if form.group % VECTOR:
        return False
    K = x.shape[1]
    sizes = x.stride(0) * x.itemsize, weight.stride(0), K * (x.itemsize if form.bits == 4 else 1)
    return all(size % ALIGNMENT == 0 for size in sizes)


def _fits_tiles(form: StoredForm, factors: Tensor) -> bool:
    """Whether ``_tiles_kernel`` accepts such scales or zero points: those of small groups are loaded in 32 bits."""
    if form.group % BLOCK_BYTES == 0:
        return True
    if form.group not in SMALL_GROUPS or factors.data_ptr() % WORD:
        return False
    sizes = factors.stride(0) * factors.itemsize, form.block // form.group * factors.itemsize
    return all(size % WORD == 0 for size in sizes)


def _plain_launch(form: StoredForm, M: int, N: int, K: int, strides: tuple[int, ...], limits: DeviceLimits) -> Launch:
    rows = max(16, min(64, next_power_of_2(M)))
    if limits.warp_size == 64 and K % 16:
        rows = 16  # each value of x has a mask of its own, in one of about a hundred scalar registers
    tiles = cdiv(M, rows)
    return Launch(
        kernels._weight_only_kernel, tiles * cdiv(N, PLAIN_COLUMNS), (M, N, K, *strides, N),
        (form, rows, PLAIN_COLUMNS, tiles), 4,
    )  # fmt: skip


def few_rows_launch(
    tile: FewRows,
    form: StoredForm,
    M: int,
    N: int,
    K: int,
    strides: tuple[int, ...],
    limits: DeviceLimits,
    gates: Gates | None = None,
) -> Launch:
    """A product of up to ``tile.columns`` rows. ``strides``: of rows of x, the weight, its scales and the residual.

    ``gates``: if the tile is ``gated``.
    """
    from qgemm.kernels.weight_only.few_rows_hopper_kernels import _few_rows_kernel

    constants: tuple[object, ...] = (form, tile, limits.pdl, None, None, False)
    if gates is not None:
        name, up_first = gates
        constants = (*constants[:3], device_activation(name, 2), GatedActivation(name), up_first)
    columns = N // 2 if tile.gated else N
    return Launch(
        _few_rows_kernel, cdiv(N, tile.rows), (M, N, K, *strides, columns), constants, tile.warps,
        pdl=limits.pdl, max_registers=tile.registers,
    )  # fmt: skip


def ring_plan(
    tile: FewRowsRing,
    form: StoredForm,
    M: int,
    N: int,
    K: int,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    limits: DeviceLimits,
) -> Plan:
    """As ``few_rows_launch``, for rows of ``dtype`` and blocks that end with K."""
    from qgemm.kernels.stages.ring import block_layout
    from qgemm.kernels.weight_only.few_rows_ring_hopper_kernels import _few_rows_ring_kernel

    stride_xm, stride_wn = strides[:2]
    blocks, words = K // form.block, BLOCK_BYTES // WORD
    x_block, w_block = (tile.splits, tile.columns, PANEL), (tile.splits, tile.rows, words // 2)
    maps = {
        0: TensorMap((blocks, M, form.block), (form.block, stride_xm, 1), x_block, block_layout(x_block, dtype)),
        1: TensorMap((blocks, N, words), (words, stride_wn // WORD, 1), w_block, block_layout(w_block, torch.int32)),
    }
    tiles = tile.tiles(N)
    product = Launch(
        _few_rows_ring_kernel, tile.grid(tiles, tile.programs * limits.num_sms),
        (M, N, K, tiles - tile.shared, tile.sharers, *strides[2:], N),
        (form, tile.unshared, tile.shared > 0), tile.warps, pdl=limits.pdl, maps=maps, max_registers=tile.registers,
    )  # fmt: skip
    partial = tile.partial_sums(tile.rows, tile.columns)
    return Plan((M, N), product, may_share=True, words=torch.int32, partial=partial)


def tiles_plan(
    tile: Tiles,
    form: StoredForm,
    M: int,
    N: int,
    K: int,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    limits: DeviceLimits,
) -> Plan:
    """A product of any number of rows of ``dtype``. ``strides``: as in ``few_rows_launch``."""
    from qgemm.kernels.stages.ring import block_layout
    from qgemm.kernels.weight_only.tiles_hopper_kernels import _tiles_kernel

    stride_xm, stride_wn = strides[:2]
    width = cdiv(K, form.block) * BLOCK_BYTES // 2 if form.bits == 4 else K // 2
    x_rows, stored = tile.widths[-1], min(tile.widths[-1], PANEL)
    maps = {
        0: TensorMap((M, K), (stride_xm, 1), (x_rows, PANEL), block_layout((x_rows, PANEL), dtype)),
        1: TensorMap(
            (N, width), (stride_wn // 2, 1), (64, BLOCK_BYTES // 2), block_layout((64, BLOCK_BYTES // 2), torch.uint16)
        ),
        7: TensorMap((M, N), (N, 1), (stored, 64), block_layout((stored, 64), dtype)),
    }
    tiles = tile.tiles(M, N)
    product = Launch(
        _tiles_kernel, tile.grid(tiles, limits.num_sms), (M, N, K, tiles - tile.shared, tile.sharers, *strides[2:]),
        (form, tile.unshared, tile.shared > 0), 4, pdl=limits.pdl, maps=maps,
    )  # fmt: skip
    partial = tile.partial_sums(TILE_ROWS, tile.columns)
    return Plan((M, N), product, may_share=True, words=torch.uint16, partial=partial)
