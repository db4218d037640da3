"""Launchers of the GEMM kernels: ``scaled_mm``, ``int_mm``, ``matmul`` on GPU tensors.

They take checked arguments (``dispatch.py``), choose a config, allocate and launch. In Triton's interpreter they take
CPU tensors.
"""

import torch
import triton
from torch import Tensor

from qgemm.kernels.config import GemmConfig, device_limits, is_valid, programs_per_sm, select_config
from qgemm.kernels.gemm_kernels import ACTIVATION_FUNCTIONS, _gemm_kernel, _gemm_streamk_kernel


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
    config = config or select_config(M, N, K, a.dtype, a.device)
    if not is_valid(config, a.element_size(), limits) or (config.streamk and a.is_floating_point()):
        raise ValueError(
            f"config {config} can't run {a.dtype} operands on {a.device} ({limits}); omit it to have one chosen"
        )

    arguments = (a, b, c, a_scale, b_scale, bias)
    shape_and_strides = (
        M, N, K, *a.stride(), *b.stride(), *c.stride(), _stride(a_scale), _stride(b_scale), _stride(bias),
    )  # fmt: skip
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_SIZE_M": config.group_size_m,
        "NUM_SMS": limits.num_sms * programs_per_sm(config, a.element_size(), limits),
        "NUM_XCDS": limits.num_xcds,
        "EVEN_K": K % config.block_k == 0,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        # Multiplying and adding the bias round apart, as in the reference: the same bits on every device.
        "enable_fp_fusion": False,
    }
    tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    streamk = config.streamk and K > 0
    # Programs beyond the tiles would find nothing to do, unless they are renumbered for chiplets.
    grid = (constants["NUM_SMS"] if streamk or limits.num_xcds > 1 else min(tiles, constants["NUM_SMS"]),)
    with torch.cuda.device_of(a):
        if streamk:
            zeros = a.new_zeros(M * N + tiles, dtype=torch.int32)
            _gemm_streamk_kernel[grid](
                *arguments, zeros, zeros[M * N :], *shape_and_strides, STREAMK_TILES=grid[0], **constants
            )  # fmt: skip
        else:
            _gemm_kernel[grid](
                *arguments,
                *shape_and_strides,
                QUANTIZED=not a.is_floating_point(),
                # allow_tf32, the older name, raises once a user has set this one.
                ALLOW_TF32=a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32",
                ACTIVATION=ACTIVATION_FUNCTIONS[activation] if activation else None,
                **constants,
            )
    return c


def _stride(vector: Tensor | None) -> int:
    """The stride of an epilogue's vector; 0 repeats a single value."""
    return vector.stride(0) if vector is not None and vector.numel() > 1 else 0
