"""An MLP of many rows is computed in parts: products of quantized rows have the same bits."""

from typing import Any

import pytest
import torch
from families import FAMILIES

from qgemm import quantize_model
from qgemm.nn.blocks import mlp


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi", "bert"])
@pytest.mark.parametrize("scheme", ["int8", "int8-static", "int4"])
def test_parts_are_the_whole(family: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = FAMILIES[family]()
    calibration = [example.inputs] if scheme == "int8-static" else None
    model: Any = quantize_model(example.model, scheme, calibration=calibration, fuse=True, progress=False)
    sizes: list[int] = []

    def computed(part: mlp.FusedMlp, x: Any, *others: Any) -> Any:
        sizes.append((x if isinstance(x, torch.Tensor) else x.values).shape[:-1].numel())
        return compute(part, x, *others)

    compute = mlp.FusedMlp._compute
    monkeypatch.setattr(mlp.FusedMlp, "_compute", computed)
    with torch.no_grad():
        expected = model(**example.inputs)[0]
        whole = list(sizes)
        sizes.clear()
        monkeypatch.setattr(mlp, "MAX_INNER_VALUES", 5 * 64)
        result = model(**example.inputs)[0]
    if scheme == "int4":  # floats, which are added in another order
        torch.testing.assert_close(result, expected)
    else:
        assert torch.equal(result, expected)
    assert len(sizes) > len(whole) > 0
    assert sum(sizes) == sum(whole)
