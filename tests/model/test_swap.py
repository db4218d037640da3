"""What goes with a layer that is swapped, and what is left when a swap doesn't come to its end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families.mixtures import MIXTURES
from torch import Tensor, nn

import qgemm
import qgemm.model.restore
import qgemm.model.swap
import qgemm.quantize
from qgemm import QuantLinear, quantize_model, report
from qgemm.calibration import GPTQ, OutlierColumns, SmoothQuant
from qgemm.model.swap import WeightError


class Noted(nn.Module):
    """Whose linear layer others have put things on: an adapter by hook, an observer, a buffer, attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.proj: Any = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.proj.gain = 2.0
        self.proj.adapter = nn.Linear(16, 16, bias=False)
        self.proj.register_buffer("largest", torch.zeros(()))
        self.proj.register_buffer("unsaved", torch.ones(()), persistent=False)
        self.proj.register_forward_hook(adapt)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.proj(x).relu())


def adapt(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    module.largest.copy_(torch.maximum(module.largest, out.detach().abs().amax()))
    return module.gain * out + module.adapter(args[0])


@pytest.mark.parametrize("scheme", ["int8", "int8-hadamard", "int4"])
def test_what_others_have_put_on_a_layer_goes_with_it(scheme: str) -> None:
    model = Noted().eval()
    x = torch.randn(5, 16)
    wanted = model(x).detach()
    largest, child = model.proj.largest, model.proj.adapter
    quantize_model(model, scheme, skip="proj.adapter")
    assert report(model).coverage > 0
    assert model.proj.gain == 2.0
    assert model.proj.adapter is child
    assert model.proj.largest is largest
    assert "proj.largest" in model.state_dict()
    assert "proj.unsaved" not in model.state_dict()
    largest.zero_()
    assert (model(x) - wanted).norm() < 0.2 * wanted.norm()
    assert largest > 0


def test_a_child_of_a_layer_is_quantized_too() -> None:
    model = quantize_model(Noted().eval())
    assert type(model.proj.adapter) is QuantLinear
    assert model(torch.randn(3, 16)).isfinite().all()


def test_what_others_have_put_on_a_layer_is_saved_and_loaded(tmp_path: Path) -> None:
    model = quantize_model(Noted().eval())
    x = torch.randn(3, 16)
    wanted = model(x)
    qgemm.save_quantized(model, tmp_path / "int8")
    loaded = qgemm.load_quantized(tmp_path / "int8", model=Noted().eval())
    assert torch.equal(loaded.proj.largest, model.proj.largest)
    assert torch.equal(loaded(x), wanted)
    assert loaded.proj.gain == 2.0


@pytest.mark.parametrize("how", ["attribute", "buffer", "child", "method"])
def test_a_name_that_the_layer_needs_keeps_it_in_float(how: str) -> None:
    model = Noted()
    if how == "attribute":
        model.proj.scheme = "mine"
    elif how == "buffer":
        model.proj.register_buffer("weight_scale", torch.ones(3))
    elif how == "child":
        model.proj.outlier_weight = nn.Linear(2, 2)
    else:
        model.proj.dequantize = lambda: None
    before = copy.copy(vars(model.proj))
    quantize_model(model)
    assert type(model.proj) is nn.Linear
    assert vars(model.proj) == before
    reasons = {record.name: record.reason for record in report(model).kept}
    assert "has a name that a quantized layer needs" in reasons["proj"]


def test_parameters_of_its_own_keep_a_layer_in_float() -> None:
    model = Noted()
    model.proj.gain_of_channels = nn.Parameter(torch.ones(16))
    quantize_model(model)
    reasons = {record.name: record.reason for record in report(model).kept}
    assert reasons["proj"] == "it has parameters of its own (gain_of_channels)"


def test_hooks_that_are_always_called_still_are() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("called"), always_call=True)
    quantize_model(model)
    with pytest.raises(ValueError, match="x has 3 columns"):
        model(torch.randn(2, 3))
    assert seen == ["called"]


# What isn't foreseen

BATCHES = [torch.randn(8, 16) for _ in range(2)]
WAYS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "with calibration": {"scheme": "int8-static", "calibration": BATCHES},
    "with a recipe": {"recipe": [SmoothQuant(), GPTQ()], "calibration": BATCHES},
    "with a budget": {"budget": qgemm.Budget(bytes=1300), "scheme": ["int8"], "calibration": BATCHES},
}


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)).eval()


def failing(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
    """The swap of layer number ``at`` fails."""
    made: list[object] = []
    original = QuantLinear.from_linear.__func__  # type: ignore[attr-defined]

    def from_linear(cls: Any, linear: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made.append(linear.bias)
        if len(made) == at + 1:
            raise error
        return original(cls, linear, *args, **kwargs)

    monkeypatch.setattr(QuantLinear, "from_linear", classmethod(from_linear))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError("no room"), RuntimeError("out of memory")], ids=repr
)
@pytest.mark.parametrize("way", ["plainly", "with calibration", "with a recipe"])
def test_before_the_first_swap_nothing_has_changed_even_without_room(
    way: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qgemm.model.restore, "free_memory", lambda device: 0)
    model = stack()
    modules, state = list(model.modules()), copy.deepcopy(model.state_dict())
    failing(monkeypatch, 0, error)
    with pytest.raises(type(error)):
        quantize_model(model, **WAYS[way])
    assert list(model.modules()) == modules
    assert not changed(model, state)
    assert model(BATCHES[0]).isfinite().all()
    assert not any(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room")], ids=repr)
@pytest.mark.parametrize("way", WAYS)
def test_without_room_a_model_that_was_swapped_in_part_refuses_to_run(
    way: str, error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(qgemm.model.restore, "free_memory", lambda device: 0)
    model = nn.Sequential(stack())
    failing(monkeypatch, 7 if way == "with a budget" else 2, error)  # six to measure what layers lose
    with pytest.raises(type(error)):
        quantize_model(model, **WAYS[way])
    assert_unusable(model)
    assert_unusable(model[0])
    with pytest.raises(RuntimeError, match=r"Load the model again"):
        qgemm.save_quantized(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def changed(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, state[name]) for name, value in model.named_parameters())


def assert_unusable(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=r"is partly quantized: quantize_model was stopped half-way \("):
        model(BATCHES[0])
    with pytest.raises(RuntimeError, match=r"Load the model again"):
        model.state_dict()
    with pytest.raises(ValueError, match=r"quantized already|nothing to"):
        quantize_model(model)


@pytest.mark.parametrize("failure", ["nan in a batch", "a method"])
def test_a_recipe_that_fails_on_the_first_block_leaves_the_model_as_it_was(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qgemm.model.restore, "free_memory", lambda device: 0)
    model = stack()
    state = copy.deepcopy(model.state_dict())
    batches = [batch.clone() for batch in BATCHES]
    if failure == "nan in a batch":
        batches[1][0, 0] = torch.nan
    else:

        def fail(self: Any, block: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(GPTQ, "apply", fail)
    with pytest.raises((ValueError, KeyboardInterrupt)):
        quantize_model(model, "int8-static", recipe=[SmoothQuant(), GPTQ()], calibration=batches)
    assert not changed(model, state)
    assert all(type(module) is not QuantLinear for module in model.modules())
    assert model(BATCHES[0]).isfinite().all()


class ReadsAWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x) @ self.read.weight.t()


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "int8-static"},
        {"scheme": "int8-static", "recipe": []},
        {"scheme": "int8", "recipe": [GPTQ()]},
        {"scheme": "int8-outliers-16"},
    ],
    ids=str,
)
def test_a_layer_that_calibration_never_called_stays_in_float(options: dict[str, Any]) -> None:
    model = ReadsAWeight().eval()
    wanted = model(BATCHES[0]).detach()
    with pytest.warns(UserWarning, match=r"'read' saw no tokens of calibration and stay in float.* reads its weight"):
        quantize_model(model, calibration=BATCHES, **options)
    assert isinstance(model.called, QuantLinear)
    assert type(model.read) is nn.Linear
    assert [(each.name, each.reason) for each in report(model).kept] == [
        ("read", "it was never called in calibration: other code may read its weight")
    ]
    assert (model(BATCHES[0]) - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1e-10, 0.02, 1e10, 1e30])
def test_the_error_is_that_of_float64(size: float, dtype: torch.dtype) -> None:
    # Squares of the smallest and of the largest are beyond float32.
    weight = (torch.randn(48, 200, dtype=torch.float64) * size).to(dtype)
    linear = nn.Linear(200, 48, bias=False, dtype=dtype)
    linear.weight.data.copy_(weight)
    layer = qgemm.QuantLinear.from_linear(linear)
    wanted = layer.restore_rows(layer.rows_from(0, 48), torch.float64) - weight.double()
    found = WeightError.of_layer(weight, layer).value
    assert found == pytest.approx((wanted.norm() / weight.double().norm()).item(), rel=1e-6)
    assert found > 1e-3


def is_inference(model: nn.Module) -> set[bool]:
    return {tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())}


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8-block", "int8-outliers-16"])
def test_a_model_that_was_quantized_in_inference_mode_passes_gradients(scheme: str) -> None:
    def make() -> Noted:
        torch.manual_seed(0)
        return Noted()

    options = {"recipe": [OutlierColumns()], "calibration": [torch.randn(4, 16)]} if "outliers" in scheme else {}
    model, wanted = make(), quantize_model(make(), scheme, **options)
    with torch.inference_mode():
        quantize_model(model, scheme, **options)
    assert is_inference(model) == {False}
    x = torch.randn(3, 16, requires_grad=True)
    (of_x,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(of_x, *torch.autograd.grad(wanted(x).sum(), x))
    model.load_state_dict(wanted.state_dict())


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_experts_and_tied_layers_that_were_quantized_in_inference_mode(scheme: str) -> None:
    example = MIXTURES["mixtral"]()
    layers = example.model.model.layers
    layers[1].self_attn.q_proj = layers[0].self_attn.q_proj
    example.model.requires_grad_(False)
    with torch.inference_mode():
        recipe = [SmoothQuant(), GPTQ()]
        quantize_model(example.model, scheme, calibration=[example.inputs], recipe=recipe)
    assert is_inference(example.model) == {False}
    assert layers[1].self_attn.q_proj is layers[0].self_attn.q_proj
    with torch.inference_mode():
        made_there = quantize_model(MIXTURES["mixtral"]().model, scheme)
    assert is_inference(made_there) == {True}
