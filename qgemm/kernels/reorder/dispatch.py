"""``reorder``: columns of rows in another order, on a GPU by a kernel that runs beside its neighbours."""

from __future__ import annotations

from torch import Tensor


def is_one_launch(x: Tensor, order: Tensor) -> bool:
    """Whether ``reorder(x, order)`` is one launch that reads ``x`` as it is."""
    return _fits(x, order) and x.is_contiguous() and not x.is_neg()


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """``x.index_select(-1, order)`` for ``x [..., K]`` and a permutation ``order``, int32 ``[K]``."""
    if not _fits(x, order):
        return x.index_select(-1, order)
    from qgemm.kernels.reorder import launcher

    return launcher.reorder(x.resolve_neg(), order)


def _fits(x: Tensor, order: Tensor) -> bool:
    return x.is_cuda and x.is_floating_point() and x.shape[-1:] == order.shape and order.is_contiguous()
