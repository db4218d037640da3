"""``torch.ops.qgemm.*``: the kernels as PyTorch operators.

| operator | computes |
|---|---|
| ``quantize_rows(x, scale, zero_point)`` | ``(q, row_scale)`` |
| ``hadamard(x)`` | ``x`` times a block-diagonal Walsh-Hadamard matrix |
| ``int_mm(a, b)`` | ``a @ b`` in int32 |
| ``scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)`` | ``(a @ b) * a_scale * b_scale + bias`` |
| ``matmul(a, b, bias, activation, out_dtype)`` | ``activation(a @ b + bias)`` of floats |
| ``quant_linear(x, weight, weight_scale, bias, input_scale)`` | an int8 linear layer, activations quantized within |
| ``quant_linear_asymmetric(x, weight, weight_scale, bias, input_scale, zero_point)`` | the same with a zero point |
| ``packed_linear(x, weight, scale, in_features, group_size, bias)`` | a linear layer of floats with a 4-bit weight |
| ``quant_experts(x, top_k_index, ...)`` | a mixture of experts in int8 |

Each runs on CPU and CUDA (ROCm included), traces under ``torch.compile`` and ``torch.export`` through a fake
implementation that makes the same checks, and has a gradient. ``dispatch.py`` documents arguments and numbers,
``declare.py`` what a declaration consists of. A file that declares operators is imported here.
"""

from qgemm.ops import products, rows
from qgemm.ops.experts import quant_experts
from qgemm.ops.linear import quant_linear

__all__ = ["products", "quant_experts", "quant_linear", "rows"]
