"""xIELU, whose coefficients a program reads before it waits for the preceding kernel: they are weights."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qgemm.kernels.stages.activations import softplus
from qgemm.kernels.stages.epilogue import rounded


@triton.jit(do_not_specialize=["SIZE"])
def _xielu_kernel(
    x, alpha_p, alpha_n, beta, eps, out,
    SIZE,
    BLOCK: tl.constexpr, PDL: tl.constexpr, NEXT_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program has a block of ``x`` and ``out``. ``PDL``, ``NEXT_EARLY``: as in ``_norm_kernel``."""
    if NEXT_EARLY:
        gdc_launch_dependents()
    slope, most = tl.load(beta).to(tl.float32), tl.load(eps).to(tl.float32)
    above = softplus(tl.load(alpha_p).to(tl.float32))
    below = slope + softplus(tl.load(alpha_n).to(tl.float32))
    if PDL:
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32)
    curve = tl.where(values > 0, above * values * values, below * (_expm1(values, most) - values))
    tl.store(out + at, rounded(curve + slope * values, out.dtype.element_ty), mask=at < SIZE)


@triton.jit
def _expm1(x, most):
    """``exp(min(x, most)) - 1``, also where ``exp`` is close to 1; NaN stays NaN."""
    y = tl.where(x > most, most, x)
    power = tl.exp(y)
    # What the difference loses of a small value, the quotient gives back.
    near = (power - 1.0) * (y / tl.where(power == 1.0, 1.0, tl.log(tl.where(y < -1.0, 1.0, power))))
    return tl.where(y < -1.0, power - 1.0, tl.where(power == 1.0, y, near))
