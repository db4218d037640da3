"""What a fused layer is allowed to be off by: roundings, and hardly another scale."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgemm import fuse, fusion_report
from qgemm.fusion.verify import MAX_ERROR, _error
from tests.fusion.test_fuse import BOTH, MIXTURE, fused_parts, quantized


def _scale_output(module: nn.Module, factor: float, is_layer: bool = False) -> None:
    """``module`` returns that much of its output, or of what it adds to its input; its code looks as before."""
    original = type(module).forward

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **others: Any) -> Any:
        out = original(self, hidden_states, *args, **others)
        x: Any = hidden_states if is_layer else 0
        if isinstance(out, tuple):
            return (x + factor * (out[0] - x), *out[1:])
        return x + factor * (out - x)

    module.__class__ = type(
        type(module).__name__, (type(module),), {"forward": forward, "__module__": original.__module__}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [0.995, 1.005])
@pytest.mark.parametrize(
    ("family", "part", "left"),
    [("llama", "", ("mlp",)), ("llama", "self_attn", ("mlp",)), ("mixtral", "mlp", ("attention",))],
    ids=str,
)
def test_another_scale_is_refused(
    family: str, part: str, left: tuple[str, ...], factor: float, dtype: torch.dtype
) -> None:
    example = quantized(family)
    model: Any = example.model.to(dtype)
    layer = model.model.layers[1]
    _scale_output(layer.get_submodule(part), factor, part == "")
    expected = example.output()
    fuse(model)
    assert "computes something else than its names say" in fusion_report(model).records[1].reason
    whole = MIXTURE if family == "mixtral" else BOTH
    assert fused_parts(model) == (whole, *([()] if part == "" else []), left)
    assert torch.equal(example.output(), expected)


def test_a_scale_counts_for_more_than_roundings() -> None:
    generator = torch.Generator().manual_seed(0)
    x, added, noise = (torch.randn(3, 5, 64, generator=generator) for _ in range(3))
    added[0, 0] = 0  # which has no scale
    for wrong, error in ((0.015 * noise, 0.015), (0.0015 * added, 0.015), (-0.003 * added, 0.03), (0 * added, 0.0)):
        assert _error(x + added + wrong, x + added, x) == pytest.approx(error, rel=0.15, abs=1e-6)
        assert _error(added + wrong, added) == pytest.approx(error, rel=0.15, abs=1e-6)
    off = added.clone()
    off[2, :3] *= 1.01  # three tokens of fifteen
    assert _error(off, added) < MAX_ERROR
    assert _error(off * float("nan"), added) == float("inf")
