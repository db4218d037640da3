"""Gradients of a mixture of experts for its input and its routing weights, through the dequantized weights.

With ``h = x @ gate_up.T + bias``, ``a = activation(h)``, ``y = a @ down.T + bias`` and a routing weight ``w``, the
gradient of ``w * y`` for ``w`` is ``grad . y = (grad @ down) . a + grad . bias``, so ``y`` itself isn't needed.

The backward makes the float weights of several experts at a time, and multiplies by them with grouped products.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.ops.float_weight import float_weight

MAX_FLOAT_BYTES = 2**28  # of the float weights of several experts
_ALIGNMENT = 16  # bytes; PyTorch's grouped products take rows of a multiple of it


def gradients(
    grad: Tensor,
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: ExpertWeights | WeightOnlyExperts,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and ``top_k_weights``, in their dtypes.

    ``grad``: the gradient of the output, ``[T, hidden_size]``.
    """
    k, E = top_k_index.shape[1], len(experts.down)
    ids, pairs = top_k_index.flatten().sort(stable=True)
    # Each pair of a token and an expert has a row, in the order of the experts.
    rows, factors = pairs // k, top_k_weights.flatten()[pairs].float()
    grad_pairs, grad_factors = x.new_zeros((len(pairs), x.shape[1])), torch.zeros_like(factors)
    ends = torch.searchsorted(ids, torch.arange(E + 1, device=ids.device))
    bounds = ends.tolist()
    for first, last in _parts(experts, x.dtype):
        some = slice(bounds[first], bounds[last])
        if some.start == some.stop:
            continue
        offsets = (ends[first + 1 : last + 1] - some.start).int()
        gate_up, down = experts.stored(first, last)
        first_weight, second_weight = (
            float_weight(each, x.dtype).unflatten(0, (last - first, -1)) for each in (gate_up, down)
        )
        h = _product(x[rows[some]], first_weight.mT, offsets)
        if gate_up.bias is not None:
            h = h + gate_up.bias.to(x.dtype).view(last - first, -1)[ids[some] - first]
        grad_y = grad[rows[some]]
        grad_inner = _product(grad_y, second_weight, offsets)
        grad_h, of_factors = _of_activation(experts.activation, h, grad_inner, factors[some], offsets, len(pairs))
        if down.bias is not None:
            of_factors = of_factors + (
                grad_y.float() * down.bias.float().view(last - first, -1)[ids[some] - first]
            ).sum(-1)
        grad_factors[some] = of_factors
        grad_pairs[some] = _product(grad_h, first_weight, offsets)
    # Sums in a fixed order: the same inputs give the same bits.
    places = torch.empty_like(pairs).index_copy_(0, pairs, torch.arange(len(pairs), device=pairs.device))
    grad_x = grad_pairs[places].view(*top_k_index.shape, x.shape[1]).float().sum(1)
    return grad_x.to(x.dtype), grad_factors[places].view(top_k_index.shape).to(top_k_weights.dtype)


def _parts(experts: ExpertWeights | WeightOnlyExperts, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Ranges ``(first, last)`` of experts whose float weights are made together, without ``last``."""
    E, (hidden_size, intermediate_size) = len(experts.down), experts.sizes
    columns = experts.activation.columns(intermediate_size)
    count = 1
    # PyTorch's grouped products are fast in bfloat16 alone.
    aligned = all(size * dtype.itemsize % _ALIGNMENT == 0 for size in (hidden_size, intermediate_size, columns))
    if dtype == torch.bfloat16 and aligned and experts.may_be_stacked:
        each = hidden_size * (columns + intermediate_size) * dtype.itemsize
        count = max(1, MAX_FLOAT_BYTES // max(each, 1))
    for first in range(0, E, count):
        yield first, min(first + count, E)


def _product(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """``rows @ weights[e]`` for the rows of each expert ``e``, which end at ``offsets[e]``."""
    if len(weights) == 1:
        return rows @ weights[0]
    out: Tensor = F.grouped_mm(rows, weights, offs=offsets)
    return out


def _of_activation(
    activation: GatedActivation, h: Tensor, grad: Tensor, factors: Tensor, offsets: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """The gradients of ``(factors * grad * activation(h)).sum()`` for ``h``, in its dtype, and ``factors``.

    ``offsets``: int32; the last one is the number of rows, at most ``most``.
    """
    if h.is_cuda and not (h.requires_grad or grad.requires_grad or factors.requires_grad):
        from qgemm.kernels.activation.launcher import activation_backward

        return activation_backward(h.contiguous(), grad.contiguous(), factors, offsets[-1:], activation, most)
    grad = grad.float()
    of_factors = (grad * activation(h)).sum(-1)
    return _activation_backward(activation, h.float(), grad * factors[:, None]).to(h.dtype), of_factors


def _activation_backward(activation: GatedActivation, h: Tensor, grad: Tensor) -> Tensor:
    """The gradient of ``activation(h)`` for ``h``, both float32, where ``grad`` is that of its result."""
    gate, up = h.chunk(2, dim=-1) if activation.gated else (h, None)
    clamped = gate if activation.limit is None else gate.clamp(max=activation.limit)
    if up is None:
        opened = grad
    else:
        clamped_up = up if activation.limit is None else up.clamp(-activation.limit, activation.limit)
        opened = grad * (clamped_up + activation.up_offset)
    grad_gate = _gate_backward(activation, clamped, opened)
    if activation.limit is not None:
        grad_gate = grad_gate.masked_fill(gate > activation.limit, 0.0)
    if up is None:
        return grad_gate
    grad_up = grad * GatedActivation(activation.name, gated=False, alpha=activation.alpha)(clamped)
    if activation.limit is not None:
        grad_up = grad_up.masked_fill(up.abs() > activation.limit, 0.0)
    return torch.cat((grad_gate, grad_up), dim=-1)


def _gate_backward(activation: GatedActivation, gate: Tensor, grad: Tensor) -> Tensor:
    out: Tensor
    if activation.name in ("silu", "quick_gelu"):
        alpha = activation.alpha if activation.name == "silu" else 1.702
        sigmoid = torch.sigmoid(alpha * gate)
        out = grad * sigmoid * (1 + alpha * gate * (1 - sigmoid))
    elif activation.name == "relu":
        out = torch.ops.aten.threshold_backward(grad, gate, 0)
    elif activation.name == "relu2":
        out = grad * 2 * gate.clamp(min=0)
    else:
        approximate = {"gelu": "none", "gelu_tanh": "tanh"}[activation.name]
        out = torch.ops.aten.gelu_backward(grad, gate, approximate=approximate)
    return out
