"""``hadamard``: rows times a block-diagonal Walsh-Hadamard matrix, on a GPU by one kernel, else by PyTorch."""

from __future__ import annotations

from torch import Tensor

from qgemm.numerics import hadamard as plain


def is_one_launch(x: Tensor) -> bool:
    """Whether ``hadamard(x)`` is one launch that reads ``x`` as it is."""
    if not x.is_cuda:
        return False
    from qgemm.kernels.hadamard import launcher

    return launcher.fits(x) and x.is_contiguous() and not x.is_neg()


def hadamard(x: Tensor) -> Tensor:
    """``qgemm.numerics.hadamard.hadamard``; where the kernel takes ``x``, a 16-bit result is rounded only once."""
    if x.is_cuda:
        from qgemm.kernels.hadamard import launcher

        if launcher.fits(x):
            return launcher.hadamard(x)
    return plain.hadamard(x)
