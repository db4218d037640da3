"""Launchers of the GEMM kernels: ``scaled_mm``, ``int_mm``, ``matmul`` on GPU tensors.

They take checked arguments (``dispatch.py``), choose a config, allocate and launch. In Triton's interpreter they take
CPU tensors.
"""

import torch
from torch import Tensor

from qgemm.kernels.config import GemmConfig, device_limits, is_valid, programs_per_sm, select_config
from qgemm.kernels.gemm_kernels import ACTIVATION_FUNCTIONS, _gemm_kernel, _gemm_streamk_kernel
from qgemm.kernels.launch import launch


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
) -> Tensor:
    """``dispatch.scaled_mm`` on a GPU."""
    return _launch(a, b, a_scale, b_scale, bias, None, out_dtype, config)


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
) -> Tensor:
    M, K = a.shape
    N = b.shape[1]
    c = a.new_empty((M, N), dtype=out_dtype)
    if c.numel() == 0:
        return c

    limits = device_limits(a.device)
    if config is None:
        config = select_config(M, N, K, a.dtype, a.device)
    elif not is_valid(config, a.element_size(), limits) or (config.streamk and a.is_floating_point()):
        raise ValueError(
            f"config {config} can't run {a.dtype} operands on {a.device} ({limits}); omit it to have one chosen"
        )

    tensors = (a, b, c, a_scale, b_scale, bias)
    numbers = (
        N, K, *a.stride(), *b.stride(), *c.stride(), _stride(a_scale, M), _stride(b_scale, N), _stride(bias, N),
    )  # fmt: skip
    slots = limits.num_sms * programs_per_sm(config, a.element_size(), limits)
    constants = (
        config.block_m, config.block_n, config.block_k, config.group_size_m,
        slots, limits.num_xcds, K % config.block_k == 0,
    )  # fmt: skip
    pipeline = (config.num_warps, config.num_stages)
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    if config.streamk and K > 0:
        zeros = a.new_zeros(M * N + tiles, dtype=torch.int32)
        workspace = (zeros, zeros[M * N :])
        launch(_gemm_streamk_kernel, slots, (*tensors, *workspace), (M,), numbers, (*constants, slots), *pipeline)
        return c

    # Programs beyond the tiles would find nothing to do, unless they are renumbered for chiplets.
    grid = slots if limits.num_xcds > 1 else min(tiles, slots)
    # allow_tf32, the older name, raises once a user has set this one.
    allow_tf32 = a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    epilogue = ACTIVATION_FUNCTIONS[activation] if activation else None
    options = (not a.is_floating_point(), allow_tf32, epilogue)
    launch(_gemm_kernel, grid, tensors, (M,), numbers, (*constants, *options), *pipeline)
    return c


def _stride(vector: Tensor | None, length: int) -> int:
    """The stride of an epilogue's vector; 0 repeats a single value."""
    return vector.stride(0) if vector is not None and vector.ndim and vector.shape[0] == length else 0
