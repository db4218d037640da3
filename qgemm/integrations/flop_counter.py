"""FLOPs of qgemm's products for ``torch.utils.flop_counter``: as for ``F.linear``, a multiply and an add count 2.

``import qgemm`` imports this module as soon as ``torch.utils.flop_counter`` is imported, which imports Triton. The
gradient of a layer's input is a product in plain PyTorch, which needs no formula; experts' gradients are operators of
their own.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

_OPS = torch.ops.qgemm
_PRODUCTS = (
    "quant_linear", "quant_linear_asymmetric", "block_scaled_linear", "weight_only_linear", "multiply", "int_mm",
    "scaled_mm", "matmul",
)  # fmt: skip


def _of_product(x: torch.Size, *others: Any, out_shape: torch.Size, **named: Any) -> int:
    """The FLOPs of ``[..., K]`` times a weight that gives ``[..., N]``, in whatever form it is stored."""
    flops: int = 2 * prod(x) * out_shape[-1]
    return flops


def _of_experts(name: str, times: int) -> Any:
    """``times`` both products for each pair of a token and one of its experts. Weights may be packed along columns."""
    places = {argument.name: at for at, argument in enumerate(getattr(_OPS, name).default._schema.arguments)}

    def count(*arguments: Any, **named: Any) -> Any:
        names = "x", "top_k_index", "gate_up", "gated"
        x, top_k_index, gate_up, gated = (arguments[places[each]] for each in names)
        outputs = gate_up[1]
        return 2 * times * prod(top_k_index) * x[-1] * (outputs + outputs // (1 + gated))

    return count


def _register() -> None:
    formulas: dict[str, Any] = dict.fromkeys(_PRODUCTS, _of_product)
    for experts in ("quant_experts", "weight_only_experts"):
        formulas[experts] = _of_experts(experts, times=1)
        backward = f"{experts}_backward"  # it recomputes the products, and the gradient of each one's input
        formulas[backward] = _of_experts(backward, times=2)
    for name, formula in formulas.items():
        if getattr(_OPS, name) not in flop_registry:  # a notebook's autoreload runs this again
            register_flop_formula(getattr(_OPS, name))(formula)


_register()
