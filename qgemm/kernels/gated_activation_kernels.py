"""Device code of ``GatedActivation``, for kernels in Triton and in Gluon."""

import triton
import triton.language as tl

from qgemm.kernels.gemm_kernels import gelu, relu, silu


@triton.jit
def gelu_tanh(x):
    """GELU by its approximation with a tanh; ``(1 + tanh(u)) / 2`` is ``sigmoid(2 * u)``."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def relu2(x):
    """``max(x, 0) ** 2``; NaN stays NaN."""
    return relu(x) * relu(x)


@triton.jit
def identity(x):
    """``x``."""
    return x


@triton.jit
def gated_activation(
    gate, up,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """``GatedActivation`` of float32 ``gate`` and ``up``, which is None without a gate. NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
    out = gate / (1.0 + tl.exp(-ALPHA * gate)) if ALPHA != 1.0 else FUNCTION(gate)
    if up is not None:
        if LIMIT is not None:
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        out *= up + UP_OFFSET
    return out


GATE_FUNCTIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "relu2": relu2}
"""Device code of each name in ``gated_activation.GATE_FUNCTIONS``."""
