"""quantize_model with a recipe: what methods are given, in what order, and what becomes of the model."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import accelerate
import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from torch import Tensor, nn

import qgemm
import qgemm.model.restore
from qgemm.calibration import (
    AWQ,
    GPTQ,
    BiasCorrection,
    Block,
    LayerWork,
    Method,
    MSEWeights,
    QuantizedWeight,
    SmoothQuant,
)


def batches_for(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Two batches, of the same tokens in another order."""
    return [inputs, {key: value.roll(1, -1) if key.endswith("ids") else value for key, value in inputs.items()}]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_state(left: nn.Module | dict[str, Tensor], right: nn.Module | dict[str, Tensor]) -> bool:
    left, right = (each.state_dict() if isinstance(each, nn.Module) else each for each in (left, right))
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "gpt2", "albert", "mixtral"])
def test_without_methods_weights_are_those_without_a_recipe(family: str) -> None:
    build = {**FAMILIES, **MIXTURES}[family]
    plain, blocks = build(), build()
    qgemm.quantize_model(plain.model)
    qgemm.quantize_model(blocks.model, calibration=batches_for(blocks.inputs), recipe=[])
    assert same_state(plain.model, blocks.model)
    assert torch.equal(plain.output(), blocks.output())
    for one, other in zip(qgemm.report(plain.model).records, qgemm.report(blocks.model).records, strict=True):
        assert one.weight_error == other.weight_error
        assert other.output_error is None or 0 < other.output_error < 0.03
        assert (other.output_error is None) == (not other.is_quantized or other.kind.endswith("Experts"))


@pytest.mark.parametrize("family", ["llama", "t5", "qwen2_5_vl"])
def test_static_scales_are_of_what_reaches_a_block_in_the_quantized_model(family: str) -> None:
    example = FAMILIES[family]()
    model, batches = example.model, batches_for(example.inputs)
    float_model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qgemm.quantize_model(model, "int8-static", calibration=batches, observer="percentile", recipe=[])
    names = [record.name for record in qgemm.report(model).quantized]
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}

    def block_of(name: str) -> str:
        parts = name.split(".")
        inside = [depth for depth in range(len(parts)) if ".".join(parts[:depth]) in lists]
        return ".".join(parts[: inside[0] + 1]) if inside else ""

    # Block by block, the quantized layers go into the float model; a block's inputs are seen just before.
    blocks = list(dict.fromkeys(block_of(name) for name in names))
    for block in sorted(blocks, key=lambda block: block == ""):
        seen = {name: qgemm.calibration.Percentile() for name in names if block_of(name) == block}
        for name in seen:

            def observe(module: nn.Module, args: Any, kwargs: Any, name: str = name, seen: Any = seen) -> None:
                seen[name] = seen[name].update(args[0] if args else kwargs["input"])

            float_model.get_submodule(name).register_forward_pre_hook(observe, with_kwargs=True)
        with torch.no_grad():
            for batch in batches:
                float_model(**batch)
        for name, observer in seen.items():
            assert model.get_submodule(name).input_scale == torch.tensor(observer.scale()), name
            parent, _, child = name.rpartition(".")
            setattr(float_model.get_submodule(parent), child, model.get_submodule(name))


@dataclass(frozen=True)
class Probe(Method):
    """Remembers what it was given."""

    name: ClassVar[str] = "probe"
    needs_data: ClassVar[bool] = False
    seen: list[Any] = field(default_factory=list)
    does: Callable[[Block], None] = lambda block: None

    def prepare(self, model: nn.Module, layers: dict[str, LayerWork]) -> None:
        self.seen.append(sorted(layers))

    def apply(self, block: Block) -> None:
        self.seen.append((block.name, list(block.layers), len(block.calls)))
        self.does(block)

    def to_dict(self) -> dict[str, Any]:
        return {}


def test_methods_get_every_block_in_order() -> None:
    example = FAMILIES["opt"]()
    model, batches = example.model, batches_for(example.inputs)
    first, second = Probe(), Probe()
    qgemm.quantize_model(model, calibration=batches, recipe=[first, second])
    assert first.seen == second.seen
    prepared, *blocks = first.seen
    names = [record.name for record in qgemm.report(model).quantized]
    assert prepared == sorted(names)
    assert [block for block, _, _ in blocks] == ["model.decoder.layers.0", "model.decoder.layers.1", ""]
    assert sorted(blocks[-1][1]) == ["model.decoder.project_in", "model.decoder.project_out"]
    assert sorted(name for _, layers, _ in blocks for name in layers) == sorted(names)
    assert all(count == len(batches) for _, _, count in blocks)


def test_a_method_sees_what_the_one_before_it_changed_and_what_quantized_blocks_return() -> None:
    example = FAMILIES["llama"]()
    model = example.model
    inputs: list[Tensor] = []

    def double_norm(block: Block) -> None:
        block.model.get_submodule(f"{block.name}.input_layernorm").weight.mul_(2.0)
        for name in ("q_proj", "k_proj", "v_proj"):
            block.layers[f"{block.name}.self_attn.{name}"].module.weight.div_(2.0)

    def look(block: Block) -> None:
        name = f"{block.name}.self_attn.q_proj"
        inputs.append(block.collect([name], rows=10)[name].rows)

    calibration = [example.inputs]
    qgemm.quantize_model(
        model, calibration=calibration, recipe=[Probe(does=look), Probe(does=double_norm), Probe(does=look)]
    )
    assert torch.equal(inputs[0] * 2.0, inputs[1])
    # The second block's input is what the quantized first block returns.
    seen: list[Tensor] = []
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    example.output()
    rows = seen[0].reshape(-1, 64)
    assert all(any(torch.equal(row, other) for other in rows) for row in inputs[3])


def test_without_room_float_weights_are_freed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qgemm.model.restore, "free_memory", lambda device: 0)
    example = FAMILIES["llama"]()
    weights = {
        block: [weakref.ref(linear.weight) for linear in layer.modules() if isinstance(linear, nn.Linear)]
        for block, layer in example.model.model.layers.named_children()
    }
    alive: list[bool] = []

    def look(block: Block) -> None:
        alive.append(any(weight() is not None for weight in weights["0"]))

    qgemm.quantize_model(
        example.model, "int8-static", calibration=[example.inputs], recipe=[SmoothQuant(), GPTQ(), Probe(does=look)]
    )
    assert alive == [True, False]
    assert all(weight() is None for weight in weights["1"])


def test_a_methods_weights_schemes_and_notes_are_used() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    values = torch.randint(-127, 128, (8, 16), dtype=torch.int8)
    scale = torch.rand(8) + 0.5

    def decide(block: Block) -> None:
        block.layers["0"].weight = QuantizedWeight(values, scale)
        block.layers["0"].notes += ["one", "two"]
        block.layers["2"].scheme = qgemm.SCHEMES["int8-static"]

    x = torch.randn(5, 16)
    qgemm.quantize_model(model, calibration=[x], recipe=[Probe(does=decide)])
    assert torch.equal(model[0].weight, values)
    assert torch.equal(model[0].weight_scale, scale)
    first, second = qgemm.report(model).records
    assert (first.note, first.action, second.note, second.action) == ("one; two", "int8", "", "int8-static")
    assert first.weight_error is not None
    assert first.weight_error > 1
    assert model[2].input_scale is not None


@pytest.mark.parametrize("breaks", ["raises", "nan", "bias"])
def test_a_method_that_fails_on_a_block_is_undone_there(breaks: str) -> None:
    example, plain = FAMILIES["bert"](), FAMILIES["bert"]()

    def fail(block: Block) -> None:
        if block.name != "bert.encoder.layer.1":
            return
        for work in block.layers.values():
            work.module.weight.mul_(3.0)
            work.weight = QuantizedWeight(torch.zeros_like(work.module.weight, dtype=torch.int8), torch.ones(1))
            work.scheme = qgemm.SCHEMES["int8-static"]
        if breaks == "nan":
            work.module.weight[0, 0] = torch.nan
        if breaks == "bias":
            work.module.bias = nn.Parameter(torch.full_like(work.module.bias, torch.inf))
        if breaks == "raises":
            torch.linalg.cholesky(-torch.eye(3))

    calibration = [example.inputs]
    qgemm.quantize_model(example.model, calibration=calibration, recipe=[Probe(does=fail)])
    qgemm.quantize_model(plain.model, calibration=calibration, recipe=[])
    assert same_state(example.model, plain.model)
    for record in qgemm.report(example.model).quantized:
        assert record.note.startswith("probe failed on its block: ") == (".layer.1." in record.name)
    assert "probe failed on its block" in str(qgemm.report(example.model))


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -1.0])
def test_scales_that_are_none_round_to_nearest(bad: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).eval()
    plain = copy.deepcopy(model)

    def decide(block: Block) -> None:
        scale = torch.ones(8)
        scale[3] = bad
        block.layers["0"].weight = QuantizedWeight(torch.ones(8, 16, dtype=torch.int8), scale)

    qgemm.quantize_model(model, recipe=[Probe(does=decide)])
    assert same_state(model, qgemm.quantize_model(plain))
    first, second = qgemm.report(model).records
    assert (first.note, second.note) == ("probe found no finite scales: rounded to nearest", "")


def test_scales_of_experts_that_are_none_round_to_nearest() -> None:
    example = MIXTURES["mixtral"]()
    plain = copy.deepcopy(example.model)

    def decide(block: Block) -> None:
        layers = [*block.layers.values()]
        block.layers.clear()
        MSEWeights().apply(block)
        block.layers.update({work.name: work for work in layers})
        for work in block.experts.values():
            assert work.weights is not None
            work.weights["down_proj"].scale[0, 0] = torch.nan

    qgemm.quantize_model(example.model, recipe=[Probe(does=decide)])
    assert same_state(example.model, qgemm.quantize_model(plain))
    notes = [record.note for record in qgemm.report(example.model).quantized if ".experts" in record.name]
    assert all("probe found no finite scales: rounded to nearest" in note for note in notes)
    assert notes


class Sided(nn.Module):
    """A layer that is called only if asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.side = nn.Linear(32, 32), nn.Linear(32, 32)
        self.eval()

    def forward(self, x: Tensor, with_side: bool = False) -> Tensor:
        return self.side(self.up(x)) if with_side else self.up(x)


def test_a_layer_that_two_blocks_share_is_seen_in_both() -> None:
    class Scaled(nn.Module):
        def __init__(self, shared: nn.Linear, gain: float) -> None:
            super().__init__()
            self.own, self.shared, self.gain = nn.Linear(16, 16), shared, gain

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shared(self.own(x) * self.gain)

    torch.manual_seed(0)
    shared = nn.Linear(16, 16)
    model = nn.Sequential(Scaled(shared, 0.1), Scaled(shared, 10.0)).eval()
    probe, x = Probe(), torch.randn(20, 16)
    expected = model(x)
    qgemm.quantize_model(model, "int8-static", calibration=[x], recipe=[probe])
    assert probe.seen[1:] == [("0", ["0.own"], 1), ("1", ["1.own"], 1), ("", ["0.shared"], 1)]
    assert model[0].shared is model[1].shared
    # The scale is one for the larger inputs, those in the second block.
    assert (model(x) - expected).norm() / expected.norm() < 0.05


def test_layers_that_saw_nothing_stay_in_float() -> None:
    model = Sided()
    weight = model.side.weight
    with pytest.warns(UserWarning, match="'side' saw no tokens of calibration") as caught:
        qgemm.quantize_model(model, "int8-static", calibration=[torch.randn(4, 32)], recipe=[GPTQ()])
    assert caught[0].filename == __file__
    assert model.side.weight is weight
    up, side = qgemm.report(model).records
    assert (up.action, side.action) == ("int8-static", "float")
    assert side.reason == "it was never called in calibration: other code may read its weight"
    assert model(torch.randn(4, 32), True).isfinite().all()


def test_nan_in_activations_is_named() -> None:
    model = Sided()
    with pytest.raises(ValueError, match="the input of 'up': x holds NaN or Inf"):
        qgemm.quantize_model(model, "int8-static", calibration=[torch.full((4, 32), torch.nan)], recipe=[])


def test_experts_that_saw_little_stay_as_they_are_and_say_so() -> None:
    example, plain = MIXTURES["mixtral"](), MIXTURES["mixtral"]()
    qgemm.quantize_model(example.model, "int8-static", calibration=[example.inputs], recipe=[GPTQ()])
    qgemm.quantize_model(plain.model)
    experts = [record for record in qgemm.report(example.model).records if record.kind.endswith("Experts")]
    assert len(experts) == 2
    for record in experts:
        assert record.action == "int8"
        assert record.note.startswith("gptq: 0 of 4 experts, which saw ")
        assert same_state(example.model.get_submodule(record.name), plain.model.get_submodule(record.name))


def test_modes_caches_and_hooks_are_as_before() -> None:
    example = FAMILIES["llama"]()
    model = example.model.train()
    model.model.norm.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    qgemm.quantize_model(model, "int8-static", calibration=[example.inputs], recipe=[SmoothQuant(), GPTQ()])
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert model.config.use_cache
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in vars(module)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "opt"])
def test_a_device_given_changes_no_bit(family: str) -> None:
    one, other = FAMILIES[family](), FAMILIES[family]()
    settings: dict[str, Any] = {"recipe": [SmoothQuant(), GPTQ()], "observer": "mse"}
    qgemm.quantize_model(one.model, "int8-static", calibration=batches_for(one.inputs), **settings)
    qgemm.quantize_model(other.model, "int8-static", calibration=batches_for(one.inputs), device="cpu", **settings)
    assert same_state(one.model, other.model)


@pytest.mark.slow
def test_models_that_accelerate_has_spread_are_worked_on_where_they_are() -> None:
    one, other = FAMILIES["t5"](), FAMILIES["t5"]()
    accelerate.dispatch_model(other.model, {"": "cpu"}, force_hooks=True)
    for example in (one, other):
        qgemm.quantize_model(
            example.model, "int8-static", calibration=batches_for(one.inputs), recipe=[SmoothQuant(), GPTQ()]
        )
    assert same_state(one.model, other.model)
    assert torch.equal(one.output(), other.output())
    assert all(hasattr(module, "_hf_hook") for module in other.model.modules() if isinstance(module, qgemm.QuantLinear))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_blocks_are_worked_on_on_a_gpu_one_at_a_time() -> None:
    example, plain = FAMILIES["t5"](), FAMILIES["t5"]()
    devices: list[set[str]] = []

    def look(block: Block) -> None:
        devices.append({parameter.device.type for parameter in block.module.parameters()})
        elsewhere = [p for name, p in block.model.named_parameters() if not name.startswith(block.name)]
        devices.append({parameter.device.type for parameter in elsewhere})
        assert all(rows.is_cuda for rows in block.outputs())

    calibration = batches_for(example.inputs)
    recipe = [Probe(does=look), SmoothQuant(), GPTQ()]
    qgemm.quantize_model(example.model, "int8-static", calibration=calibration, recipe=recipe, device="cuda")
    assert devices == [{"cuda"}, {"cpu"}] * 4
    assert {parameter.device.type for parameter in example.model.parameters()} == {"cpu"}
    expected = plain.output()
    assert (example.output() - expected).norm() / expected.norm() < 0.02


RECIPES: dict[str, list[Method]] = {
    "gptq": [GPTQ()],
    "awq": [AWQ()],
    "all": [SmoothQuant(alpha="search"), AWQ(clip=False), GPTQ(mse=True), BiasCorrection()],
}


@pytest.mark.slow(quick=["llama"])
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", "all"),
        ("bert", "all"),
        pytest.param("bert", "gptq", marks=pytest.mark.complete),
        pytest.param("t5", "awq", marks=pytest.mark.complete),
        ("t5", "gptq"),
    ],
)
def test_the_same_call_gives_the_same_bits(family: str, recipe: str) -> None:
    models = []
    for seed in (1, 2):
        example = FAMILIES[family]()
        torch.manual_seed(seed)
        expected = example.output()
        qgemm.quantize_model(
            example.model, "int8-static", calibration=iter(batches_for(example.inputs)), recipe=RECIPES[recipe]
        )
        models.append(example.model)
        assert (example.output() - expected).norm() / expected.norm() < 0.04
    assert same_state(*models)
    assert qgemm.report(models[0]) == qgemm.report(models[1])
    assert qgemm.calibration.Recipe.of(models[0]) == qgemm.calibration.Recipe(RECIPES[recipe])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_model_made_in_inference_mode_gets_the_same_bits(family: str) -> None:
    def make() -> nn.Module:
        example = {**FAMILIES, **MIXTURES}[family]()
        return qgemm.quantize_model(
            example.model, "int8-static", calibration=batches_for(example.inputs), recipe=[SmoothQuant(), GPTQ()]
        )

    with torch.inference_mode():
        model = make()
    assert same_state(model, make())


def test_progress_shows_the_error_of_each_layer(capsys: pytest.CaptureFixture[str]) -> None:
    model = Sided()
    qgemm.quantize_model(model, calibration=[(torch.randn(4, 32), True)], recipe=[], progress=True)
    shown = capsys.readouterr().err
    assert f"side error {qgemm.report(model).records[1].output_error:.4f}" in shown
    qgemm.quantize_model(Sided(), calibration=[(torch.randn(4, 32), True)], recipe=[], progress=False)
    assert not capsys.readouterr().err
