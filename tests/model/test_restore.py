"""A model whose quantization fails half-way is what it was, or refuses to run where memory has no room for that."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from torch import Tensor, nn

import qgemm
import qgemm.calibration.quantize_block
import qgemm.model.restore
import qgemm.quantize
from qgemm import quantize_model
from qgemm.calibration import GPTQ, BiasCorrection, MSEWeights, ResidualRotation, SmoothQuant
from qgemm.model.announce import announce_quantized

ERRORS: list[BaseException] = [KeyboardInterrupt(), MemoryError("no room"), RuntimeError("a bug")]


class Plain(nn.Module):
    """A layer under two names, one with all that others put on layers, and PyTorch's attention in two forms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.alias = nn.Linear(32, 32)
        self.noted: Any = nn.Linear(32, 32)
        self.noted.gain = 2.0
        self.noted.adapter = nn.Linear(32, 32, bias=False)
        self.noted.register_buffer("largest", torch.zeros(()))
        self.noted.register_forward_hook(adapt)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.cross = nn.MultiheadAttention(32, 4, kdim=16, vdim=24, batch_first=True)
        self.last = nn.Linear(32, 32)
        self.train()
        self.last.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.noted(self.alias(x)) + self.first(x))
        return self.last(self.cross(x, x[..., :16], x[..., 8:], need_weights=False)[0])


def adapt(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    module.largest.copy_(torch.maximum(module.largest, out.detach().abs().amax()))
    return module.gain * out + module.adapter(args[0])


def plain(**options: Any) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    x = torch.randn(3, 5, 32)
    if "calibration" in options:
        options["calibration"] = [3 * torch.randn(3, 5, 32) for _ in range(2)]  # the buffer grows
    return Plain(), {"x": x}, options


def family(build: Callable[[], Any], **options: Any) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    example = build()
    if "recipe" in options:
        options["calibration"] = [example.inputs]
    return example.model, example.inputs, options


CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any], dict[str, Any]]]] = {
    "plain": lambda: plain(),
    "hadamard": lambda: plain(scheme="int8-hadamard"),
    "static": lambda: plain(scheme="int8-static", calibration=None),
    "a recipe": lambda: plain(calibration=None, recipe=[SmoothQuant(), GPTQ(), BiasCorrection()]),
    "a budget": lambda: plain(calibration=None, budget=qgemm.Budget(bytes=35_000)),
    "llama, block by block": lambda: family(
        FAMILIES["llama"], scheme="int8-static", recipe=[SmoothQuant(), GPTQ()], device="cpu"
    ),
    "llama, rotated": lambda: family(FAMILIES["llama"], recipe=[ResidualRotation(), SmoothQuant(), GPTQ()]),
    "experts": lambda: family(MIXTURES["mixtral"]),
    "experts with a recipe": lambda: family(MIXTURES["mixtral"], recipe=[SmoothQuant(), GPTQ()]),
}


def failing(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException | None) -> list[str]:
    """The swap of layer number ``at`` fails, when its quantized layer is in its place; returns what was swapped."""
    done: list[str] = []

    def swap(model: nn.Module, layer: Any, *args: Any, **kwargs: Any) -> Any:
        record = qgemm.model.swap.swap(model, layer, *args, **kwargs)
        done.append(layer.name)
        if error is not None and len(done) == at + 1:
            raise error
        return record

    monkeypatch.setattr(qgemm.calibration.quantize_block, "swap", swap)
    return done


class Picture:
    """All that can be told of a model: modules by identity, what they hold in order, values, configs."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [(name, id(m), type(m)) for name, m in model.named_modules(remove_duplicate=False)]
        self.held = [(key, *held) for m in model.modules() for key, value in vars(m).items() for held in _held(value)]
        self.kept = list(model.modules()), [value for m in model.modules() for value in vars(m).values()]  # their ids
        self.values = {name: value.clone() for name, value in _tensors(model)}
        self.configs = [copy.deepcopy(vars(m)["config"]) for m in model.modules() if "config" in vars(m)]

    def assert_same(self, model: nn.Module) -> None:
        now = Picture(model)
        assert now.names == self.names
        assert now.held == self.held
        assert list(now.values) == list(self.values)
        for name, value in now.values.items():
            assert torch.equal(value, self.values[name]), name
        assert [config.to_dict() for config in now.configs] == [config.to_dict() for config in self.configs]


def _held(value: Any) -> Iterator[tuple[Any, ...]]:
    yield (id(value) if not isinstance(value, bool | int | float | str | tuple) else value,)
    if isinstance(value, dict):
        yield from ((key, id(each)) for key, each in value.items())
    elif isinstance(value, set):
        yield from ((each,) for each in sorted(value))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    yield from model.state_dict().items()


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """In the modes that the modules are in, but for dropout."""
    torch.manual_seed(1)
    with torch.no_grad():
        out = model(**inputs)
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qgemm.model.restore, "free_memory", lambda device: 0)


@pytest.mark.slow(quick=["plain", "static"])
@pytest.mark.filterwarnings("ignore:'")  # experts that saw few tokens
@pytest.mark.parametrize("case", CASES)
def test_a_model_that_fails_half_way_is_what_it_was(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, options = CASES[case]()
    expected = output(model, inputs)
    whole = copy.deepcopy(model)
    before = Picture(model)
    done = failing(monkeypatch, 0, None)
    quantize_model(whole, **options)
    assert len(done) >= 3
    modes = {name: module.training for name, module in model.named_modules()}
    # One after the other, on the same model.
    for at, error in zip((0, len(done) // 2, len(done) - 1), ERRORS, strict=True):
        failing(monkeypatch, at, error)
        with pytest.raises(type(error)):
            quantize_model(model, **options)
        before.assert_same(model)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(output(model, inputs), expected)
    failing(monkeypatch, 0, None)
    quantize_model(model, **options)
    assert qgemm.report(model) == qgemm.report(whole)
    assert torch.equal(output(model, inputs), output(whole, inputs))
    state = whole.state_dict()
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:'")
@pytest.mark.parametrize("case", CASES)
def test_without_room_it_refuses_to_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room(monkeypatch)
    model, inputs, options = CASES[case]()
    failing(monkeypatch, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        quantize_model(model, **options)
    with pytest.raises(RuntimeError, match=r"is partly quantized: quantize_model was stopped half-way \(Keyb"):
        model(**inputs)
    with pytest.raises(RuntimeError, match=r"Load the model again"):
        model.state_dict()


def test_what_fails_after_the_last_swap_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    example = FAMILIES["llama"]()
    before = Picture(example.model)

    def fail(model: nn.Module) -> None:
        announce_quantized(model)
        raise KeyboardInterrupt

    monkeypatch.setattr(qgemm.quantize, "announce_quantized", fail)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(example.model)
    before.assert_same(example.model)
    assert not hasattr(example.model, "_qgemm_report")


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_made_an_error_counts_too() -> None:
    model = nn.ModuleDict({"body": nn.Linear(32, 32), "head": nn.Linear(32, 96)})
    before = Picture(model)
    with pytest.raises(UserWarning, match="of the bytes in this model's weights are quantized"):
        quantize_model(model)
    before.assert_same(model)


def test_a_finished_model_holds_nothing_of_what_it_was() -> None:
    model = Plain()
    weight = weakref.ref(model.last.weight)
    quantize_model(model)
    assert weight() is None  # without a garbage collection


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_with_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, options = CASES["llama, block by block"]()
    whole = quantize_model(copy.deepcopy(model), **options)
    before = Picture(model)
    for at in (10, 3):  # both in the second block, of seven layers
        failing(monkeypatch, at, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            quantize_model(model, **options, resume_folder=tmp_path)
        before.assert_same(model)
    done = failing(monkeypatch, 0, None)
    quantize_model(model, **options, resume_folder=tmp_path)
    assert len(done) == 7
    assert torch.equal(output(model, inputs), output(whole, inputs))


WEIGHTS = 64 * 64
BATCHES = [torch.randn(2, 64)]
# Of three layers a byte a weight and a sixteenth, and one layer in float32.
LAYERS = (3 + 3 / 16 + 4) * WEIGHTS
COPIES = 3 * 4 * WEIGHTS


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, LAYERS),
        # As much again for runs and methods.
        ({"scheme": "int8-static", "calibration": BATCHES}, 2 * LAYERS),
        ({"recipe": [MSEWeights()]}, 2 * (LAYERS + COPIES)),
        ({"recipe": [GPTQ()], "calibration": BATCHES}, 2 * (LAYERS + COPIES)),
    ],
    ids=["plain", "static", "recipe without data", "recipe"],
)
def test_how_much_room_there_must_be(options: dict[str, Any], needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, is_restored in ((needed, True), (needed - 1, False)):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        monkeypatch.setattr(qgemm.model.restore, "free_memory", lambda device, free=free: free)
        failing(monkeypatch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            quantize_model(model, **options)
        assert (type(model[0]) is nn.Linear) == is_restored


def test_room_is_counted_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(qgemm.model.restore, "free_memory", lambda device: asked.append(device.type) or 0)
    with torch.device("meta"):
        quantize_model(nn.Sequential(nn.Linear(64, 64)))
    assert asked == []  # nothing to keep
    quantize_model(accelerate.cpu_offload(nn.Sequential(nn.Linear(64, 64)), execution_device="cpu"))
    assert asked == ["cpu"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float_layers_that_are_kept_leave_the_device_of_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, options = CASES["llama, block by block"]()
    before = Picture(model)
    expected = output(model, inputs)
    floats = [module for module in model.model.layers[0].modules() if isinstance(module, nn.Linear)]
    seen: list[set[str]] = []

    def look(model: nn.Module, layer: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append({parameter.device.type for module in floats for parameter in module.parameters()})
        if len(seen) == 10:
            raise KeyboardInterrupt
        return qgemm.model.swap.swap(model, layer, *args, **kwargs)

    monkeypatch.setattr(qgemm.calibration.quantize_block, "swap", look)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(model, **{**options, "device": "cuda"})
    assert seen == [{"cuda"}] * 7 + [{"cpu"}] * 3
    before.assert_same(model)
    assert torch.equal(output(model, inputs), expected)
