"""Which branches of a fused layer add the residual in their last product, and what they read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES, Example
from families.mixtures import MIXTURES
from fusion.encoders import LAYER_SCALES
from fusion.structures import STRUCTURES

from qgemm import fuse, quantize_model
from qgemm.kernels.norms import Norm
from qgemm.kernels.rows import QuantizedRows
from qgemm.nn import QuantLinear
from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.layer import MAX_SMALL_ROWS, FusedLayer
from qgemm.nn.blocks.operands import QuantizedOperands, SummedOperands
from qgemm.nn.blocks.steps import NormStep, normalize_and_read
from tests.operators import Operators


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


def operators_of_layers(example: Example) -> list[str]:
    """Those that run in fused layers in a forward of a model."""
    found: list[str] = []
    with torch.no_grad(), Operators() as counted:
        for module in example.model.modules():
            if isinstance(fused_of(module), FusedLayer):
                module.register_forward_pre_hook(lambda *_: starts.append(len(counted.names)))
                module.register_forward_hook(lambda *_: found.extend(counted.names[starts.pop() :]))
        starts: list[int] = []
        example.model(**example.inputs)
    return found


@pytest.mark.parametrize("scheme", ["int8", "int4-32"])
@pytest.mark.parametrize("family", ["olmo2", "granite", "gemma4_keys", "nemotron", "granitemoe", "dinov2"])
def test_norms_and_factors_are_no_operators_of_their_own(family: str, scheme: str) -> None:
    example = {**FAMILIES, **STRUCTURES, **MIXTURES, **LAYER_SCALES}[family]()
    fuse(quantize_model(example.model.bfloat16(), scheme), example.inputs)
    example.inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in example.inputs.items()}
    found = Counter(operators_of_layers(example))
    assert found
    arithmetic = ("mul", "add", "mean", "pow", "rsqrt", "native_layer_norm", "_to_copy")
    assert {name: count for name, count in found.items() if name.removeprefix("aten.") in arithmetic} == {}


@pytest.mark.parametrize("rows", [1, 40])
def test_on_a_gpu_a_norm_adds_the_residual_and_quantizes_for_the_next_branch(rows: int, device: torch.device) -> None:
    model: Any = fuse(quantize_model(FAMILIES["bert"]().model.to(device)))
    layer = next(module for module in model.modules() if isinstance(fused_of(module), FusedLayer))
    fused: Any = fused_of(layer)
    hidden = model.config.hidden_size
    x = torch.randn(1, rows, hidden, device=device)
    seen: list[Any] = []

    def recording(step: Any) -> Any:
        def branch(x: Any, operands: Any, residual: torch.Tensor | None, *others: Any) -> torch.Tensor:
            seen.append((type(x), residual is not None))
            out: torch.Tensor = step.branch(x, operands, residual, *others)
            return out

        return replace(step, branch=branch)

    with torch.no_grad():
        found = replace(fused, steps=tuple(map(recording, fused.steps)))(x, fused.operands(), dict(fused.defaults))
        wanted = layer(x)
    on_gpu = [(torch.Tensor, False), (QuantizedRows, False)]
    assert seen == (on_gpu if device.type == "cuda" else [(torch.Tensor, True)] * 2)
    assert torch.equal(found, wanted[0] if isinstance(wanted, tuple) else wanted)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("reads_rows", [False, True])
def test_what_a_norm_of_a_sum_gives_the_next_branch(kind: str, reads_rows: bool, device: torch.device) -> None:
    module = torch.nn.LayerNorm(32) if kind == "layer" else torch.nn.RMSNorm(32, eps=1e-5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    step = NormStep(module.to(device), Norm(kind, 1e-5))
    layer = QuantLinear.from_linear(torch.nn.Linear(32, 8)).to(device)
    operands = (QuantizedOperands(*(getattr(layer, name) for name in layer.operands)),) if reads_rows else ()
    x, residual = torch.randn(3, 32, device=device), torch.randn(3, 32, device=device)
    with torch.no_grad():
        normed, into = normalize_and_read(x, residual, step, operands)
        torch.testing.assert_close(normed, module(residual + x))
        assert isinstance(into, QuantizedRows) == reads_rows
        if isinstance(into, QuantizedRows):
            assert all(map(torch.equal, into, torch.ops.qgemm.quantize_rows(normed, None)))
        else:
            assert into is normed
        alone, into = normalize_and_read(x, None, step, operands)
        assert into is alone
        torch.testing.assert_close(alone, module(x))
