"""Activations of float32 values on the device; ``kernels/activations.py`` has those of the host."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from qgemm.kernels.stages.aggregate import INTERPRETING


@triton.jit
def relu(x):
    """``max(x, 0)``; NaN stays NaN."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def gelu(x):
    """``x * Phi(x)``, exact."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_of_16_bits(x):
    """``gelu`` with a relative error of at most 2^-17, for values that are rounded to 16 bits: 18 instructions, not 38.

    ``Phi(-|x|) = exp(-x^2 / 2) * p(t)`` with ``t = 1 / (1 + c |x|)`` and a polynomial ``p`` that was fitted to it.
    """
    size = tl.abs(x)
    below = tl.math.fma(size, 0.30405591591021547, 1.0)
    if INTERPRETING:
        t, gauss = 1.0 / below, tl.exp(x * x * -0.5)
    else:
        t, gauss = libdevice.fast_dividef(1.0, below), libdevice.fast_expf(x * x * -0.5)
    p = tl.math.fma(t, -0.07679555312853158, 0.20382636088412603)
    p = tl.math.fma(t, p, -0.005735698949912983)
    p = tl.math.fma(t, p, 0.14086471848581789)
    p = tl.math.fma(t, p, 0.11620960027566116)
    p = tl.math.fma(t, p, 0.12163303290062902)
    tail = p * t * gauss
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def gelu_tanh(x):
    """GELU in its tanh approximation; ``(1 + tanh(u)) / 2`` is ``sigmoid(2 * u)``."""
    return times_sigmoid(x, 1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def silu(x):
    """``x * sigmoid(x)``."""
    return times_sigmoid(x, x)


@triton.jit
def times_sigmoid(x, u):
    """``x / (1 + exp(-u))``, without the extra steps that exponentials and quotients below 2^-126 would take."""
    if INTERPRETING:
        return x / (1.0 + tl.exp(-u))
    else:
        return libdevice.fast_dividef(x, 1.0 + libdevice.fast_expf(-u))


@triton.jit
def relu2(x):
    """``max(x, 0) ** 2``; NaN stays NaN."""
    return relu(x) * relu(x)


@triton.jit
def quick_gelu(x):
    """``x * sigmoid(1.702 * x)``."""
    return times_sigmoid(x, 1.702 * x)


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``."""
    return times_sigmoid(1.0, x)


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, and ``x`` itself from 20 on, as PyTorch's."""
    small = tl.exp(tl.where(x > 20.0, 0.0, x))
    above = 1.0 + small
    # What the sum loses of a small value, the quotient gives back.
    log = tl.where(above == 1.0, small, tl.log(above) * (small / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def gate_value(gate, FUNCTION: tl.constexpr, ACTIVATION: tl.constexpr):
    """The activated gate of ``ACTIVATION``, a ``GatedActivation``. ``FUNCTION``: the device function of its name."""
    if ACTIVATION.limit is not None:
        gate = tl.where(gate > ACTIVATION.limit, ACTIVATION.limit, gate)
    return gate / (1.0 + tl.exp(-ACTIVATION.alpha * gate)) if ACTIVATION.alpha != 1.0 else FUNCTION(gate)


@triton.jit
def gate_slope(gate, ACTIVATION: tl.constexpr):
    """The derivative of ``gate_value``."""
    x = gate
    if ACTIVATION.limit is not None:
        x = tl.where(gate > ACTIVATION.limit, ACTIVATION.limit, gate)
    if ACTIVATION.name == "silu" or ACTIVATION.name == "quick_gelu":
        ALPHA: tl.constexpr = 1.702 if ACTIVATION.name == "quick_gelu" else ACTIVATION.alpha
        sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * x))
        slope = sigmoid * (1.0 + ALPHA * x * (1.0 - sigmoid))
    elif ACTIVATION.name == "relu":
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION.name == "relu2":
        slope = 2.0 * relu(x)
    elif ACTIVATION.name == "gelu":
        slope = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        sigmoid = 1.0 / (1.0 + tl.exp(-u))
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid) * (1.5957691216057308 + 0.21406447104837 * x * x))
    return slope if ACTIVATION.limit is None else tl.where(gate > ACTIVATION.limit, 0.0, slope)


@triton.jit
def up_value(up, ACTIVATION: tl.constexpr):
    """The factor that ``ACTIVATION`` multiplies an activated gate by."""
    LIMIT: tl.constexpr = ACTIVATION.limit
    if LIMIT is not None:
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return up + ACTIVATION.up_offset


def device_activation(name: str, itemsize: int):
    """The device function of ``name`` for values that are rounded to so many bytes."""
    return gelu_of_16_bits if (name, itemsize) == ("gelu", 2) else DEVICE_ACTIVATIONS[name]


def device_gate(name: str, itemsize: int):
    """The same for a function of ``gating.dispatch.GATES``."""
    return {"sigmoid": sigmoid, "softplus": softplus}.get(name) or device_activation(name, itemsize)


DEVICE_ACTIVATIONS = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "relu2": relu2,
    "quick_gelu": quick_gelu,
}
"""The device functions by name."""
