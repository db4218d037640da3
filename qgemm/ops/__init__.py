"""``torch.ops.qgemm.*``: the kernels as PyTorch operators, each declared once; ``declare.py`` says how.

Every file that declares operators is imported here:

- ``rows``: ``quantize_rows``, ``quantize_groups``, ``activation_quantize``, ``activate``, ``hadamard``.
- ``norms``: ``norm_quantize``, ``add_norm_quantize``, ``add_norm``.
- ``products``: ``int_mm``, ``scaled_mm``, ``matmul``.
- ``linear``: ``quant_linear``, ``quant_linear_asymmetric``, ``block_scaled_linear``, ``weight_only_linear``,
  ``multiply``.
- ``float_weight``: the float weight that their gradients need.
- ``experts``: ``quant_experts``, ``weight_only_experts``.
- ``router``: ``route``, ``router_logits``.
- ``attention``: ``decode_attention``, ``paged_attention``, ``store_in_pages``.
- ``sampling``: ``choose_tokens``.
- ``rotary``: ``rotate``, ``rotate_and_store``, ``store_key_value``, ``rotary_angles``.

Each operator runs on CPU and CUDA (ROCm included), can be traced by ``torch.compile`` and ``torch.export`` through a
fake implementation that makes the same checks, and has a gradient. ``dispatch.py`` documents arguments and numbers.
"""

from qgemm.ops import attention, norms, products, rotary, router, rows, sampling
from qgemm.ops.experts import quant_experts, weight_only_experts
from qgemm.ops.linear import block_scaled_linear, quant_linear

__all__ = [
    "attention",
    "block_scaled_linear",
    "norms",
    "products",
    "quant_experts",
    "quant_linear",
    "rotary",
    "router",
    "rows",
    "sampling",
    "weight_only_experts",
]
