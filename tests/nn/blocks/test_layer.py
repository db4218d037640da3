"""Which branches of a fused layer add the residual in their last product, and what they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES

from qgemm import fuse, quantize_model
from qgemm.kernels.rows import QuantizedRows
from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.layer import MAX_SMALL_ROWS, FusedLayer
from qgemm.nn.blocks.operands import SummedOperands


@pytest.mark.parametrize(
    ("rows", "is_summed", "expected"),
    [
        (MAX_SMALL_ROWS, False, [True, True]),
        (MAX_SMALL_ROWS + 1, False, [False, True]),  # the first goes with the norm behind it
        (MAX_SMALL_ROWS, True, [False, True]),  # of several processes
    ],
)
def test_which_products_add_the_residual(rows: int, is_summed: bool, expected: list[bool]) -> None:
    model: Any = fuse(quantize_model(FAMILIES["llama"]().model))
    fused: Any = fused_of(model.model.layers[0])
    operands = fused.operands()
    if is_summed:
        operands[0] = (*operands[0][:-1], SummedOperands(operands[0][-1], None))  # type: ignore[arg-type]
    added: list[bool] = []

    def branch(x: Any, operands: Any, residual: torch.Tensor | None, *_: Any) -> torch.Tensor:
        added.append(residual is not None)
        return torch.zeros(1, rows, model.config.hidden_size)

    recording = replace(fused, steps=tuple(replace(step, branch=branch) for step in fused.steps))
    recording(torch.randn(1, rows, model.config.hidden_size), operands, {})
    assert added == expected


@pytest.mark.parametrize("rows", [1, 40])
def test_a_norm_behind_a_branch_adds_its_residual_and_quantizes_for_the_next(rows: int) -> None:
    model: Any = fuse(quantize_model(FAMILIES["bert"]().model))
    layer = next(module for module in model.modules() if isinstance(fused_of(module), FusedLayer))
    fused: Any = fused_of(layer)
    hidden = model.config.hidden_size
    x = torch.randn(1, rows, hidden)
    seen: list[Any] = []

    def recording(step: Any) -> Any:
        def branch(x: Any, operands: Any, residual: torch.Tensor | None, *others: Any) -> torch.Tensor:
            seen.append((type(x), residual))
            out: torch.Tensor = step.branch(x, operands, residual, *others)
            return out

        return replace(step, branch=branch)

    with torch.no_grad():
        found = replace(fused, steps=tuple(map(recording, fused.steps)))(x, fused.operands(), dict(fused.defaults))
        wanted = layer(x)
    assert seen == [(torch.Tensor, None), (QuantizedRows, None)]
    assert torch.equal(found, wanted[0] if isinstance(wanted, tuple) else wanted)
