"""An MLP: many rows are computed in parts, the gates of a few rows are activated by their product."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES

from qgemm import fuse, quantize_model
from qgemm.kernels.activations import Gates
from qgemm.nn.blocks import mlp
from qgemm.nn.blocks.operands import FloatOperands
from tests.operators import Operators


# Each family, and each kind of rows with norms before them and after them.
@pytest.mark.parametrize(
    ("family", "scheme"),
    [(family, "int8") for family in ("llama", "gemma2", "gpt2", "phi", "bert")]
    + [(family, scheme) for family in ("llama", "bert") for scheme in ("int8-static", "int4")],
)
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
        monkeypatch.setattr(mlp, "WHOLE_TILES", 1)
        result = model(**example.inputs)[0]
    if scheme == "int4":  # floats, which are added in another order
        torch.testing.assert_close(result, expected)
    else:
        assert torch.equal(result, expected)
    assert len(sizes) > len(whole) > 0
    assert sum(sizes) == sum(whole)


@pytest.mark.parametrize("rows", [2304, 2305, 4609, 16_384, 65_536])
def test_parts_are_whole_tiles_of_about_equal_sizes(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At Llama 3 8B's sizes; nothing is computed."""
    parts: list[int] = []

    def noted(part: mlp.FusedMlp, x: torch.Tensor, *others: Any) -> torch.Tensor:
        parts.append(len(x))
        return x

    monkeypatch.setattr(mlp.FusedMlp, "_compute", noted)
    wide, narrow = (SimpleNamespace(layers=[SimpleNamespace(out_features=size)]) for size in (28_672, 4))
    block: Any = mlp.FusedMlp(wide, narrow, torch.nn.SiLU(), "silu", True)  # type: ignore[arg-type]
    x = torch.zeros(rows, 4)
    assert block(x, (None, None), None, torch.float32, {}).shape == (rows, 4)
    assert sum(parts) == rows
    assert max(parts) * 28_672 <= mlp.MAX_INNER_VALUES
    assert all(part % mlp.WHOLE_TILES == 0 for part in parts[:-1])
    assert len(parts) == 1 or parts[-1] > parts[0] - 2 * len(parts) * mlp.WHOLE_TILES


@pytest.mark.parametrize("scheme", ["int4", "int4-32", "mxfp4", "int8-weight"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_the_product_of_a_few_rows_activates_its_gates(
    family: str, scheme: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as by an activation of its own, also where the call is recalled."""
    example = FAMILIES[family]()
    model: Any = quantize_model(example.model.bfloat16().to(device), scheme, fuse=True, progress=False)
    rows: list[int] = []

    def activated(own: FloatOperands, x: torch.Tensor, gates: Gates) -> torch.Tensor:
        rows.append(x.shape[:-1].numel())
        return compute(own, x, gates)

    compute = FloatOperands.activated
    monkeypatch.setattr(FloatOperands, "activated", activated)
    token = torch.ones(1, 1, dtype=torch.int64, device=device)
    with torch.no_grad():
        outs = [model(token).logits for _ in range(3)]
        assert rows == [1] * 3 * model.config.num_hidden_layers
        monkeypatch.setattr(mlp, "MAX_FEW_ROWS", 0)
        expected = model(token).logits
    assert all(torch.equal(out, expected) for out in outs)


def test_gates_are_activated_in_a_compiled_model() -> None:
    example = FAMILIES["llama"]()
    model: Any = quantize_model(example.model, "int4", fuse=True, progress=False)
    token = torch.ones(1, 1, dtype=torch.int64)
    with torch.no_grad():
        expected = model(token).logits
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(token).logits, expected)


def test_gates_before_a_product_of_quantized_rows_are_quantized() -> None:
    example = FAMILIES["llama"]()
    model: Any = quantize_model(example.model, {"*.down_proj": "int8", "*": "int4"}, progress=False)
    token = torch.ones(1, 1, dtype=torch.int64)
    with torch.no_grad():
        expected = model(token).logits
    fuse(model)
    with Operators() as counted, torch.no_grad():
        torch.testing.assert_close(model(token).logits, expected, rtol=1e-4, atol=1e-5)
    assert counted.names.count("qgemm.activation_quantize") == model.config.num_hidden_layers
