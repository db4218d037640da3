"""Launchers of the GEMM kernels: ``scaled_mm``, ``int_mm``, ``matmul`` on GPU tensors.

They take checked arguments (``dispatch.py``), choose a config, allocate and launch. In Triton's interpreter they take
CPU tensors.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qgemm.kernels.gemm.config import GemmConfig, is_valid, programs_per_sm, select_config
from qgemm.kernels.gemm.kernels import _block_scaled_kernel, _gemm_kernel, _gemm_streamk_kernel
from qgemm.kernels.launch.device import DeviceLimits, device_limits
from qgemm.kernels.launch.launch import ALIGNMENT, Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.stages.activations import DEVICE_ACTIVATIONS
from qgemm.numerics.formats import FP8, INT8


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
    constant_b: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """``dispatch.scaled_mm`` on a GPU."""
    if residual is not None:
        residual = with_contiguous_columns(residual)
    return _launch(a, b, a_scale, b_scale, bias, None, out_dtype, config, constant_b, residual)


def int_mm(a: Tensor, b: Tensor, config: GemmConfig | None = None) -> Tensor:
    """``dispatch.int_mm`` on a GPU."""
    return _launch(a, b, None, None, None, None, torch.int32, config)


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """``dispatch.matmul`` on a GPU."""
    return _launch(a, b, None, None, bias, activation, out_dtype or a.dtype, config)


def _launch(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    config: GemmConfig | None,
    constant_b: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    c = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if c.numel():
        product = plan_product(a, b, a_scale, b_scale, bias, activation, out_dtype, config, constant_b, residual)
        if product.takes_bytes:
            a, b = a.view(torch.int8), b.view(torch.int8)
        product.launch(a, b, c, a_scale, b_scale, bias, residual)
    return c


class Product(NamedTuple):
    """A kernel bound to everything about a product but its tensors: a, b, c, a's and b's scales, bias, residual."""

    config: GemmConfig
    launch: Launch | StreamKLaunch
    takes_bytes: bool = False
    """Whether a and b are to be the bytes of e4m3, int8, where Triton doesn't have that."""


class StreamKLaunch:
    """A ``Launch`` of the Stream-K kernel, which adds into zeros: the output's partial sums and a count per tile."""

    aligned = None

    def __init__(self, launch: Launch, tiles: int) -> None:
        """``tiles``: how many the output has."""
        self._launch = launch
        self._tiles = tiles

    def __call__(self, *tensors: Tensor | None) -> None:
        """As a launch of any other product."""
        c = tensors[2]
        assert c is not None
        zeros = c.new_zeros(c.numel() + self._tiles, dtype=torch.int32)
        self._launch(*tensors, zeros, zeros[c.numel() :])


def plan_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    config: GemmConfig | None = None,
    constant_b: bool = False,
    residual: Tensor | None = None,
) -> Product:
    """The product of tensors like these, with a contiguous output of at least one value.

    ``constant_b``: see ``dispatch.scaled_mm``. ``residual``: ``[M, N]`` with contiguous columns.
    """
    M, K = a.shape
    N = b.shape[1]
    if b_scale is not None and b_scale.ndim == 2:
        assert a_scale is not None
        scale_strides = a_scale.stride(0), b_scale.stride(0)
        block_strides = a_scale.stride(1), b_scale.stride(1)
    else:
        scale_strides, block_strides = (vector_stride(a_scale, M), vector_stride(b_scale, N)), None
    epilogue_strides = (*scale_strides, vector_stride(bias, N), row_stride(residual))
    kind = (
        make_product,
        M, N, K, (*a.stride(), *b.stride(), N, 1, *epilogue_strides),
        a.dtype, out_dtype, a_scale is None, None if bias is None else bias.dtype, residual is None, activation,
        # allow_tf32, the older name, raises once a user has set this one.
        a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32",
        a.device, (a.data_ptr() | b.data_ptr()) % ALIGNMENT == 0, config, constant_b, block_strides,
    )  # fmt: skip
    product: Product | None = plans.get(kind)
    return plans.keep(kind, make_product(*kind[1:])) if product is None else product


def make_product(
    M: int,
    N: int,
    K: int,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    raw: bool,
    bias_dtype: torch.dtype | None,
    no_residual: bool,
    activation: str | None,
    allow_tf32: bool,
    device: torch.device,
    aligned: bool,
    config: GemmConfig | None,
    constant_b: bool,
    block_strides: tuple[int, int] | None = None,
) -> Product:
    """A product that has not been planned before. A ``Launch`` is for one dtype of the bias, and a residual or none.

    ``block_strides``: of scales of blocks, from one block of K to the next; None where there are none.
    """
    limits = device_limits(device)
    is_fp8 = dtype == FP8.storage
    # Sums of other formats can't be stored, or take registers that there aren't: of fp8's without scales.
    multiplied = not raw if dtype == INT8.storage else dtype in (FP8.storage, torch.float16, torch.bfloat16)
    hopper = (
        limits.hopper and multiplied and out_dtype.itemsize == 2 and K > 0
        and aligned and _copy_engine_takes(N, K, dtype.itemsize, *strides[:4]) and has_hopper_kernel()
    )  # fmt: skip
    if config is not None and config.schedule == "specialized":
        config = replace(config, promotes=is_fp8)
    if config is None:
        config = select_config(
            M, N, K, dtype, device, hopper, not no_residual, block_strides is not None, activation is not None
        )
    elif not is_valid(config, dtype.itemsize, limits) or (config.schedule == "streamk" and dtype.is_floating_point):
        raise ValueError(
            f"config {config} can't run {dtype} operands on {device} ({limits}); omit it to have one chosen"
        )
    elif config.schedule == "specialized" and not hopper:
        raise ValueError(
            f"config {config} takes scaled int8 operands, fp8, float16 or bfloat16, with K contiguous and addresses "
            "and rows that are multiples of 16 bytes, N a multiple of 8, and returns float16 or bfloat16; omit it to "
            "have one chosen"
        )

    if config.schedule == "specialized":
        from qgemm.kernels.gemm.hopper import gemm_launch

        function = DEVICE_ACTIVATIONS[activation] if activation else None
        launch = gemm_launch(
            config, M, N, K, strides, out_dtype, constant_b, limits, dtype, function, block_strides
        )  # fmt: skip
        return Product(config, launch)

    tiles = config.tiles(M, N)
    slots = limits.num_sms * programs_per_sm(config, dtype.itemsize, limits)
    numbers = (M, N, K, *strides)
    constants: tuple[Any, ...] = (
        config, slots, limits.num_xcds, K % config.block_k == 0,
    )  # fmt: skip
    warps = config.num_warps
    # Products without scales are those of ``matmul``, which is for devices with fp8.
    decodes = is_fp8 and not raw and not limits.multiplies_fp8
    if block_strides is not None:
        constants = (config, limits.num_xcds, K % config.block_k == 0, limits.pdl, decodes)
        launch = Launch(
            _block_scaled_kernel, tiles, (*numbers, *block_strides), constants, warps, config.num_stages, limits.pdl,
            max_registers=max_registers(limits),
        )  # fmt: skip
        return Product(config, launch, decodes)
    if not no_residual:  # values of which have to be beside as many sums in a thread's registers: no more than 64
        warps = max(warps, config.block_m * config.block_n // (64 * limits.warp_size))
    if config.schedule == "streamk" and K > 0:
        constants = (*constants, slots)
        launch = Launch(
            _gemm_streamk_kernel, slots, numbers, constants, warps, config.num_stages,
            max_registers=max_registers(limits),
        )  # fmt: skip
        return Product(config, StreamKLaunch(launch, tiles))

    # Only persistent programs are renumbered for chiplets.
    persistent = config.schedule != "tiles" or limits.num_xcds > 1
    # Programs beyond the tiles would find nothing to do, unless they are renumbered.
    grid = tiles if not persistent else slots if limits.num_xcds > 1 else min(tiles, slots)
    epilogue = DEVICE_ACTIVATIONS[activation] if activation else None
    constants = (*constants, not dtype.is_floating_point, allow_tf32, epilogue, persistent, limits.pdl, decodes)
    launch = Launch(
        _gemm_kernel, grid, numbers, constants, warps, config.num_stages, limits.pdl,
        max_registers=max_registers(limits),
    )  # fmt: skip
    return Product(config, launch, decodes)


def max_registers(limits: DeviceLimits) -> int | None:
    """Of a thread, as ``Launch`` takes it: all there are on Blackwell.

    Of its own accord the assembler takes fewer there, so that more programs fit, and spills.
    """
    return 255 if limits.pdl and not limits.hopper else None


def _copy_engine_takes(
    N: int, K: int, itemsize: int, stride_am: int, stride_ak: int, stride_bk: int, stride_bn: int
) -> bool:
    return (
        stride_ak == stride_bk == 1
        and stride_am * itemsize % 16 == stride_bn * itemsize % 16 == N % 8 == 0
        and min(stride_am, stride_bn) >= K
    )


def has_hopper_kernel() -> bool:
    """Whether this version of Triton has what Hopper's kernel is written in, which is experimental there."""
    try:
        importlib.import_module("qgemm.kernels.gemm.hopper_kernels")
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"triton {triton.__version__} has a Gluon that qgemm doesn't support ({error}): products on Hopper "
            "run the slower kernel for all devices; install triton 3.6 to 3.9 for the faster one",
            stacklevel=2,
        )
        return False
    return True


def with_contiguous_columns(matrix: Tensor) -> Tensor:
    """``matrix``, copied unless its columns are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def row_stride(matrix: Tensor | None) -> int:
    """The stride of an epilogue's matrix; 1, which is compiled in, where there is none."""
    return 1 if matrix is None else matrix.stride(0)


def vector_stride(vector: Tensor | None, length: int) -> int:
    """The stride of an epilogue's vector; 0 repeats a single value."""
    return vector.stride(0) if vector is not None and vector.ndim and vector.shape[0] == length else 0
