"""Launchers of the GEMM kernels: ``scaled_mm``, ``int_mm``, ``matmul`` on GPU tensors.

They accept checked arguments (``dispatch.py``), choose a config, allocate and launch. In Triton's interpreter they
accept CPU tensors.
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
from qgemm.kernels.gemm.problem import Problem
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
    return _launch(
        a, b, out_dtype, config, a_scale=a_scale, b_scale=b_scale, bias=bias, residual=residual, constant_b=constant_b
    )


def int_mm(a: Tensor, b: Tensor, config: GemmConfig | None = None) -> Tensor:
    """``dispatch.int_mm`` on a GPU."""
    return _launch(a, b, torch.int32, config)


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """``dispatch.matmul`` on a GPU."""
    return _launch(a, b, out_dtype or a.dtype, config, bias=bias, activation=activation)


def _launch(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    config: GemmConfig | None,
    *,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    constant_b: bool = False,
) -> Tensor:
    c = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if c.numel():
        product = plan_product(
            a, b, out_dtype, config, a_scale=a_scale, b_scale=b_scale, bias=bias, residual=residual,
            activation=activation, constant_b=constant_b,
        )  # fmt: skip
        if product.takes_bytes:
            a, b = a.view(torch.int8), b.view(torch.int8)
        product.launch(a, b, c, a_scale, b_scale, bias, residual)
    return c


def find_launch(
    q: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> tuple[Launch | StreamKLaunch, tuple[Tensor | None, ...]]:
    """The launch of such a call of ``dispatch.multiply``, which returned ``out``, and what to call it with."""
    N, K = weight.shape
    a, a_scale, c = q.view(-1, K), row_scale.view(-1), out.view(-1, N)
    added = None if residual is None else with_contiguous_columns(residual.reshape(-1, N))
    product = plan_product(
        a, weight.t(), out.dtype, a_scale=a_scale, b_scale=weight_scale, bias=bias, residual=added, constant_b=True
    )
    return product.launch, (a, weight.t(), c, a_scale, weight_scale, bias, added)


class Product(NamedTuple):
    """A kernel bound to all of a product but its tensors: a, b, c, a's and b's scales, bias, residual."""

    config: GemmConfig
    launch: Launch | StreamKLaunch
    takes_bytes: bool = False
    """Whether a and b must be passed as the bytes of e4m3, int8, where Triton doesn't have e4m3."""


class StreamKLaunch:
    """A ``Launch`` of the Stream-K kernel, with zeroed memory that it adds to: partial sums, and a count per tile."""

    aligned = None

    def __init__(self, launch: Launch, tiles: int) -> None:
        """``tiles``: how many tiles the output has."""
        self._launch = launch
        self._tiles = tiles

    def __call__(self, *tensors: Tensor | None) -> None:
        """As the launch of any other product."""
        c = tensors[2]
        assert c is not None
        zeros = c.new_zeros(c.numel() + self._tiles, dtype=torch.int32)
        self._launch(*tensors, zeros, zeros[c.numel() :])


def plan_product(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    config: GemmConfig | None = None,
    *,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None = None,
    constant_b: bool,
) -> Product:
    """The product for tensors like these, with a contiguous output of at least one value.

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
    problem = Problem(
        M, N, K, (*a.stride(), *b.stride(), N, 1, *epilogue_strides), a.dtype, out_dtype,
        a_scale is not None, None if bias is None else bias.dtype, residual is not None, activation,
        # allow_tf32, the older name, raises an error once a user has set this one.
        a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32",
        a.device, (a.data_ptr() | b.data_ptr()) % ALIGNMENT == 0, constant_b, block_strides,
    )  # fmt: skip
    kind = (make_product, problem, config)
    product: Product | None = plans.get(kind)
    return plans.keep(kind, make_product(problem, config)) if product is None else product


def make_product(problem: Problem, config: GemmConfig | None) -> Product:
    """A product that hasn't been planned before, with ``config``, or with a chosen one if it is None."""
    limits = device_limits(problem.device)
    config = _find_config(problem, config, limits)
    if config.schedule == "specialized":
        from qgemm.kernels.gemm.hopper import gemm_launch

        return Product(config, gemm_launch(config, problem, limits))
    if problem.block_strides is not None:
        return _block_scaled_product(config, problem, limits)
    return _plain_product(config, problem, limits)


def _find_config(problem: Problem, config: GemmConfig | None, limits: DeviceLimits) -> GemmConfig:
    """``config``, after a check that it can run the product; or a chosen one if it is None."""
    M, N, K, strides, dtype, *_ = problem
    # Sums of other formats can't be stored or, those of fp8 without scales, need registers that aren't available.
    multiplied = problem.scaled if dtype == INT8.storage else dtype in (FP8.storage, torch.float16, torch.bfloat16)
    hopper = (
        limits.hopper and multiplied and problem.out_dtype.itemsize == 2 and K > 0
        and problem.aligned and _copy_engine_takes(N, K, dtype.itemsize, *strides[:4]) and has_hopper_kernel()
    )  # fmt: skip
    if config is None:
        return select_config(
            M, N, K, dtype, problem.device, hopper, problem.has_residual, problem.block_strides is not None,
            problem.activation is not None,
        )  # fmt: skip
    if config.schedule == "specialized":
        config = replace(config, promotes=dtype == FP8.storage)
    if not is_valid(config, dtype.itemsize, limits) or (config.schedule == "streamk" and dtype.is_floating_point):
        raise ValueError(
            f"config {config} can't run {dtype} operands on {problem.device} ({limits}); omit it to have one chosen"
        )
    if config.schedule == "specialized" and not hopper:
        raise ValueError(
            f"config {config} takes scaled int8 operands, fp8, float16 or bfloat16, with K contiguous and addresses "
            "and rows that are multiples of 16 bytes, N a multiple of 8, and returns float16 or bfloat16; omit it to "
            "have one chosen"
        )
    return config


def _decodes(problem: Problem, limits: DeviceLimits) -> bool:
    """Whether the kernel gets the bytes of fp8. Products without scales are ``matmul``'s, on devices with fp8."""
    return problem.dtype == FP8.storage and problem.scaled and not limits.multiplies_fp8


def _block_scaled_product(config: GemmConfig, problem: Problem, limits: DeviceLimits) -> Product:
    M, N, K, strides, *_, block_strides = problem
    decodes = _decodes(problem, limits)
    launch = Launch(
        _block_scaled_kernel, config.tiles(M, N), (M, N, K, *strides, *(block_strides or ())),
        (config, limits.num_xcds, K % config.block_k == 0, limits.pdl, decodes), config.num_warps, config.num_stages,
        limits.pdl, max_registers=max_registers(limits),
    )  # fmt: skip
    return Product(config, launch, decodes)


def _plain_product(config: GemmConfig, problem: Problem, limits: DeviceLimits) -> Product:
    """A product by the kernels for every GPU: Stream-K's, or the one for persistent programs and single tiles."""
    M, N, K, strides, dtype, *_ = problem
    tiles = config.tiles(M, N)
    slots = limits.num_sms * programs_per_sm(config, dtype.itemsize, limits)
    numbers = (M, N, K, *strides)
    constants: tuple[Any, ...] = (config, slots, limits.num_xcds, K % config.block_k == 0)
    warps = config.num_warps
    if problem.has_residual:  # a thread holds as many of its values as sums: at most 64 each
        warps = max(warps, config.block_m * config.block_n // (64 * limits.warp_size))
    if config.schedule == "streamk" and K > 0:
        launch = Launch(
            _gemm_streamk_kernel, slots, numbers, (*constants, slots), warps, config.num_stages,
            max_registers=max_registers(limits),
        )  # fmt: skip
        return Product(config, StreamKLaunch(launch, tiles))
    # Only persistent programs are renumbered for chiplets.
    persistent = config.schedule != "tiles" or limits.num_xcds > 1
    # Programs beyond the tiles would have nothing to do, unless they are renumbered.
    grid = tiles if not persistent else slots if limits.num_xcds > 1 else min(tiles, slots)
    epilogue = DEVICE_ACTIVATIONS[problem.activation] if problem.activation else None
    decodes = _decodes(problem, limits)
    constants = (*constants, not dtype.is_floating_point, problem.allow_tf32, epilogue, persistent, limits.pdl, decodes)
    launch = Launch(
        _gemm_kernel, grid, numbers, constants, warps, config.num_stages, limits.pdl,
        max_registers=max_registers(limits),
    )  # fmt: skip
    return Product(config, launch, decodes)


def max_registers(limits: DeviceLimits) -> int | None:
    """The maximum number of registers per thread, for ``Launch``: all that there are on Blackwell.

    By itself the assembler uses fewer there, so that more programs fit, and spills.
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
    """Whether this version of Triton has the Gluon that Hopper's kernel is written in, which is experimental."""
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
    """The stride of an epilogue's matrix; 1, which is compiled in, if there is none."""
    return 1 if matrix is None else matrix.stride(0)


def vector_stride(vector: Tensor | None, length: int) -> int:
    """The stride of an epilogue's vector; 0 repeats a single value."""
    return vector.stride(0) if vector is not None and vector.ndim and vector.shape[0] == length else 0
