"""The product of a router, wherever the tensors are. ``kernels/dispatch.py`` has ``route``, which follows it."""

import torch
from torch import Tensor

from qgemm.kernels.checks import check_same_device, check_strided, conversion, names_of, on_gpu
from qgemm.kernels.router.reference import router_logits_reference
from qgemm.numerics.formats import FLOAT_DTYPES


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``x @ weight.T + bias`` in ``dtype``, ``[T, E]``: added in float32 and rounded once.

    ``x``: float16, bfloat16 or float32, ``[T, K]``; ``weight``: ``[E, K]``; ``bias``: ``[E]``. ``dtype``: that of
    ``x``, which weight and bias have too, or float32, for floats of any kind. On a GPU, few tokens are one launch,
    which reads the weight while the preceding kernel runs; PyTorch multiplies many, and all on a CPU.
    """
    check_router_logits(x, weight, bias, dtype)
    if on_gpu(x):
        from qgemm.kernels.router import launcher

        out: Tensor = launcher.router_logits(x, weight, bias, dtype)
        return out
    with torch.no_grad():
        return router_logits_reference(x, weight, bias, dtype)


def check_router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    """Raises if ``router_logits`` doesn't accept these."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x is {x.dtype}; router_logits accepts {names_of(FLOAT_DTYPES)}: {conversion(x)}")
    check_strided("x", x)
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x is {list(x.shape)} and weight {list(weight.shape)}; they must be [T, K] and [E, K]")
    if dtype not in (x.dtype, torch.float32):
        raise TypeError(f"dtype is {dtype}; it must be {x.dtype}, as x, or torch.float32")
    for name, tensor in (("weight", weight), ("bias", bias)):
        wanted = FLOAT_DTYPES if dtype == torch.float32 else (dtype,)
        if tensor is not None and tensor.dtype not in wanted:
            raise TypeError(f"{name} is {tensor.dtype}; for logits in {dtype} it must be {names_of(wanted)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}; it must be [{weight.shape[0]}]")
    check_same_device(x=x, weight=weight, bias=bias)
