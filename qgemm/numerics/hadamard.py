"""``hadamard(x)``: rows times a block-diagonal orthonormal Walsh-Hadamard matrix.

``x @ H``, where ``H`` has blocks ``H_n / sqrt(n)`` along its diagonal; ``n`` is the largest power of two that divides
K, and ``H_n`` is Sylvester's matrix: ``H_1 = [1]``, ``H_2n = [[H_n, H_n], [H_n, -H_n]]``. ``H`` is symmetric and its
own inverse, so ``(x @ H) @ (W @ H).T = x @ W.T``: a layer may rotate its input if its weight ``[N, K]`` was rotated in
the same way. Large values in a few columns are spread over their whole block, which reduces the error of quantization
(QuaRot, Ashkboos et al. 2024, arXiv 2404.00456).

Both sides of a rotation use this function: the layer for its input, and the code that works on its weight or on
statistics of its input (a second moment ``S [K, K]`` of the input becomes ``H @ S @ H = hadamard(hadamard(S).T)``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A larger block takes two products, with H_a and H_b where a * b = n: fewer operations, one more pass over memory.
MAX_PRODUCT_COLUMNS = 256

_matrices: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}


def block_size(K: int) -> int:
    """The largest power of two that divides ``K``; 1 for 0."""
    return K & -K or 1


@torch.no_grad()
def hadamard(x: Tensor) -> Tensor:
    """``x @ H`` for float ``x [..., K]``, in its dtype, contiguous. If K is odd, it is a copy.

    Products run on the device, with sums in float32 or wider. A 16-bit dtype is rounded once more if ``n`` is above
    256, and once more if ``log2(n)`` is odd. NaN or Inf in a row spreads to the whole block that it is in.
    """
    n = block_size(x.shape[-1])
    if n == 1 or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    bits = n.bit_length() - 1
    right_bits = bits if n <= MAX_PRODUCT_COLUMNS else bits // 2
    # The matrices contain only powers of two, which are exact in every dtype; a root of two is applied afterwards.
    right_shift = bits // 2 if n <= MAX_PRODUCT_COLUMNS else (right_bits + 1) // 2
    with torch.autocast(x.device.type, enabled=False):
        out = x.reshape(*x.shape[:-1], -1, 1 << right_bits) @ _sylvester(right_bits, right_shift, x)
        if n > MAX_PRODUCT_COLUMNS:
            blocks = out.reshape(-1, n >> right_bits, 1 << right_bits)
            out = _sylvester(bits - right_bits, bits // 2 - right_shift, x) @ blocks
    if bits % 2:
        out *= math.sqrt(0.5)
    return out.reshape(x.shape)


def _sylvester(bits: int, shift: int, like: Tensor) -> Tensor:
    """``H_n * 2^-shift`` for ``n = 2^bits``, with the dtype and device of ``like``."""
    key = (bits, shift, like.dtype, like.device)
    if key in _matrices:
        return _matrices[key]
    matrix = torch.full((1, 1), 2.0**-shift, dtype=like.dtype, device=like.device)
    for _ in range(bits):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    # While a CUDA graph is captured, values aren't computed, so they can't be cached.
    if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        _matrices[key] = matrix
    return matrix
