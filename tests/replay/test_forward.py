"""``fast_forward``: graphs give what the model gives, and are captured again, or not at all, where they wouldn't.

Without a GPU graphs are recordings of operators, on the same tensors and without Python.
"""

import contextlib
import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertModel, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import qgemm
from qgemm.replay.forward import MAX_CHANGES, GraphedForward
from qgemm.replay.graphs import CaptureError, GraphMemory

ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
ENCODER |= {"vocab_size": 99}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.factor = 2.0
        self.factors = [1.0]
        self.runs = 0

    def forward(self, x: Tensor, extra: Any = None, *, flip: bool = False) -> dict[str, Any]:
        y = self.layer(x) * self.factor * self.factors[0]
        if isinstance(extra, dict):
            y = y + extra["bias"]
        return {"y": y.flip(0) if flip else y, "flip": flip, "many": (x + 1, [y, None])}


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def scaled(device: torch.device) -> Scaled:
    return Scaled().eval().to(device)


def inputs(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, 8, device=device)


def assert_runs_as_before(model: Scaled, *args: Any, **kwargs: Any) -> None:
    out, expected = model(*args, **kwargs), Scaled.forward(model, *args, **kwargs)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_outputs_are_the_models_for_each_form_of_inputs(
    graphs: list[Any], scaled: Scaled, device: torch.device
) -> None:
    assert qgemm.fast_forward(scaled) is scaled
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((inputs(3, device),), {}),
        ((inputs(4, device),), {}),
        ((inputs(3, device), {"bias": inputs(3, device)}), {}),
        ((inputs(3, device),), {"flip": True}),
        ((inputs(8, device).t(),), {}),
    ]
    for turn in range(3):
        for args, kwargs in calls:
            args[0].add_(turn)
            assert_runs_as_before(scaled, *args, **kwargs)
    assert len(graphs) == len(calls)
    for context in (torch.inference_mode(), sdpa_kernel(SDPBackend.MATH)):
        with context:
            for _ in range(2):
                assert scaled(inputs(3, device))["y"].is_inference() == torch.is_inference_mode_enabled()
    assert len(graphs) == len(calls) + 2


def test_outputs_belong_to_the_caller(graphs: list[Any], scaled: Scaled, device: torch.device) -> None:
    qgemm.fast_forward(scaled)
    first, second, third = (scaled(torch.full((3, 8), float(i), device=device)) for i in range(3))
    for i, out in enumerate((first, second, third)):
        assert torch.equal(out["many"][0], torch.full((3, 8), i + 1.0, device=device))
    assert len(graphs) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_encoders_are_replayed(graphs: list[Any], fused: bool, device: torch.device) -> None:
    model = qgemm.quantize_model(BertModel(BertConfig(**ENCODER)).eval().to(device), fuse=fused)
    ids = torch.randint(5, 99, (3, 7), device=device)
    mask = torch.ones_like(ids)
    mask[1:, -2:] = 0
    expected = [model(input_ids=ids.roll(i), attention_mask=mask, output_hidden_states=True) for i in range(4)]
    qgemm.fast_forward(model)
    for i, wanted in enumerate(expected):
        out = model(input_ids=ids.roll(i), attention_mask=mask, output_hidden_states=True)
        assert type(out) is type(wanted)
        assert torch.equal(out.last_hidden_state, wanted.last_hidden_state)
        assert torch.equal(out.hidden_states[1], wanted[2][1])
        assert torch.equal(out[1], wanted.pooler_output)
    assert len(graphs) == 1


def test_changes_are_seen(graphs: list[Any], scaled: Scaled, device: torch.device) -> None:
    qgemm.fast_forward(scaled)
    x = inputs(3, device)
    changes: list[Callable[[], object]] = [
        lambda: setattr(scaled, "factor", 3.0),
        lambda: scaled.factors.__setitem__(0, 5.0),
        lambda: setattr(scaled.layer.weight, "data", scaled.layer.weight.data.flip(0)),
        lambda: setattr(scaled.layer, "forward", lambda x: x * 7),
        lambda: setattr(scaled, "layer", nn.Linear(8, 8, device=device).eval()),
        lambda: qgemm.quantize_model(scaled, skip=[], min_features=0) and None,
    ]
    for count, change in enumerate(changes[:-1], 1):
        for _ in range(2):
            assert_runs_as_before(scaled, x)
        assert len(graphs) == count
        change()
    for _ in range(2):
        assert_runs_as_before(scaled, x)
    assert len(graphs) == len(changes)
    scaled.layer.weight.mul_(2)  # which a graph reads
    assert_runs_as_before(scaled, x)
    assert len(graphs) == len(changes)


def test_attention_of_another_kind_is_seen(graphs: list[Any], device: torch.device) -> None:
    AttentionInterface.register("alike", sdpa_attention_forward)
    AttentionMaskInterface.register("alike", sdpa_mask)
    model = qgemm.fast_forward(BertModel(BertConfig(**ENCODER)).eval().to(device))
    ids = torch.randint(5, 99, (3, 7), device=device)
    for count, attention in enumerate(("sdpa", "alike", "sdpa"), 1):
        model.set_attn_implementation(attention)
        for _ in range(2):
            model(ids)
        assert len(graphs) == count


@pytest.mark.parametrize("case", ["gradients", "training", "autocast", "mode", "tangents", "cache"])
def test_calls_that_are_more_than_kernels_run_as_before(
    graphs: list[Any], case: str, scaled: Scaled, device: torch.device
) -> None:
    qgemm.fast_forward(scaled)
    x = inputs(3, device)
    contexts: dict[str, Any] = {
        "gradients": torch.enable_grad(),
        "autocast": torch.autocast(device.type, torch.bfloat16),
        "mode": FlopCounterMode(display=False),
        "tangents": forward_ad.dual_level(),
    }
    scaled.train(case == "training")
    extra = DynamicCache() if case == "cache" else None
    for _ in range(2):
        with contexts.get(case, contextlib.nullcontext()):
            out = scaled(x, extra)["y"]
            assert torch.equal(out, Scaled.forward(scaled, x)["y"])
        assert out.requires_grad == (case == "gradients")
    assert not graphs


def test_no_more_graphs_than_asked_for(graphs: list[Any], scaled: Scaled, device: torch.device) -> None:
    qgemm.fast_forward(scaled, max_graphs=2)
    for rows in (1, 2, 3, 1, 2, 3):
        assert_runs_as_before(scaled, inputs(rows, device))
    assert len(graphs) == 2
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="max_graphs is"):
            qgemm.fast_forward(scaled, max_graphs=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        qgemm.fast_forward("model")  # type: ignore[type-var]


class Counting(Scaled):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.runs += 1
        return super().forward(x + self.runs)


class Storing(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.seen += x.sum(0)
        return super().forward(x + self.seen)


class Overwriting(Scaled):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().forward(x.add_(1))


class Opaque(Scaled):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return iter([self.layer(x)])


class Reading(Scaled):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.layer(x) * x.sum().item()


@pytest.mark.parametrize("kind", [Counting, Storing, Overwriting, Opaque, Reading])
def test_models_that_a_graph_can_not_repeat_run_as_before_with_a_reason(
    graphs: list[Any], kind: type[Scaled], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu" and kind is Reading:

        def fail(memory: GraphMemory, run: Callable[[], None]) -> Any:
            memory.captures = False
            raise CaptureError("the host waits")

        monkeypatch.setattr(GraphMemory, "capture", fail)
    torch.manual_seed(0)
    model = kind().eval().to(device)
    before = copy.deepcopy(model)
    qgemm.fast_forward(model)
    given = [inputs(3, device) for _ in range(4)]
    again = copy.deepcopy(given)
    reasons = {
        Counting: "its attributes change",
        Storing: "writes to its inputs or buffers",
        Overwriting: "writes to its inputs or buffers",
        Opaque: "its output holds a builtins.list_iterator",
        Reading: "",
    }
    with pytest.warns(UserWarning, match=f"{kind.__name__} run without CUDA graphs: .*{reasons[kind]}") as warned:
        outputs = [model(x) for x in given]
    assert len(warned) == 1
    for out, x in zip(outputs, again, strict=True):
        expected = before(x)
        if kind is Opaque:
            out, expected = list(out), list(expected)
        if kind is not Counting:  # its first call has counted twice
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(given, again, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_hooks_of_diffusers_scripts_and_parameters_elsewhere_are_named(
    graphs: list[Any], scaled: Scaled, device: torch.device
) -> None:
    scaled.layer._diffusers_hook = object()
    with pytest.warns(UserWarning, match="hooks of diffusers, which keep state"):
        qgemm.fast_forward(scaled)(inputs(3, device))
    del scaled.layer._diffusers_hook
    scaled.other = torch.jit.trace(nn.Linear(8, 8), inputs(3, torch.device("cpu"))).to(device)
    with pytest.warns(UserWarning, match="modules of TorchScript"):
        qgemm.fast_forward(scaled)(inputs(3, device))
    del scaled.other
    scaled.register_buffer("table", torch.zeros(3, device="meta"))
    with pytest.warns(UserWarning, match="parameters on meta, and inputs on"):
        qgemm.fast_forward(scaled)(inputs(3, device))
    assert not graphs


def test_hooks_run_in_every_call(graphs: list[Any], scaled: Scaled, device: torch.device) -> None:
    x, seen = inputs(3, device), []
    qgemm.fast_forward(scaled)(x)
    own = scaled.register_forward_hook(lambda module, given, out: seen.append("whole"))  # around the forward
    for _ in range(2):
        scaled(x)
    assert len(graphs) == 2
    hooks = [
        scaled.layer.register_forward_hook(lambda module, given, out: seen.append("after")),
        scaled.layer.register_forward_pre_hook(lambda module, given: seen.append("before")),
    ]
    for _ in range(3):
        scaled(x)
    assert seen == 2 * ["whole"] + 3 * ["before", "after", "whole"]
    for hook in (own, *hooks):
        hook.remove()
    hooks = [register_module_forward_hook(lambda module, given, out: seen.append("all"))]
    for _ in range(2):
        scaled(x)
    assert seen[-4:] == 4 * ["all"]
    hooks[0].remove()
    assert len(graphs) == 2
    for _ in range(2):
        assert_runs_as_before(scaled, x)
    assert len(graphs) == 3


def test_calibration_sees_every_batch(graphs: list[Any], device: torch.device) -> None:
    batches = [torch.randn(4, 8, device=device) * (i + 1) for i in range(3)]
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).eval().to(device)
    scales = []
    for _ in range(2):
        with qgemm.calibrate(model) as calibration:
            for batch in batches:
                model(batch)
        scales.append(calibration.input_scales("int8-static"))
        qgemm.fast_forward(model)(batches[0])
    assert len(graphs) == 2
    assert scales[0] == scales[1]


def test_attributes_that_change_between_calls_end_graphs(
    graphs: list[Any], scaled: Scaled, device: torch.device
) -> None:
    qgemm.fast_forward(scaled)
    x = inputs(3, device)
    for turn in range(MAX_CHANGES + 1):
        scaled.factor = float(turn)
        assert_runs_as_before(scaled, x)
    scaled.factor = 0.5
    with pytest.warns(UserWarning, match="its attributes change between calls"):
        assert_runs_as_before(scaled, x)
    scaled.factor = 0.7
    assert_runs_as_before(scaled, x)
    assert len(graphs) == MAX_CHANGES + 1


def test_a_table_that_grows_is_captured_anew(graphs: list[Any], scaled: Scaled, device: torch.device) -> None:
    layer, forward = scaled.layer, nn.Linear.forward

    def grow(x: Tensor) -> Tensor:
        if len(layer.table) < len(x):
            layer.table = torch.arange(len(x), dtype=x.dtype, device=device)[:, None]
        return forward(layer, x) + layer.table[: len(x)]

    layer.table, layer.forward = torch.zeros(0, device=device), grow
    qgemm.fast_forward(scaled)
    for rows in (2, 5, 2, 5, 3, 2):
        assert_runs_as_before(scaled, inputs(rows, device))
    assert len(graphs) == 4


def test_it_is_undone(graphs: list[Any], scaled: Scaled, device: torch.device) -> None:
    x = inputs(3, device)
    qgemm.fast_forward(scaled)(x)
    qgemm.fast_forward(scaled, enabled=False)
    assert "forward" not in vars(scaled)
    scaled.forward = own = lambda x: {"y": x}  # as hooks of accelerate
    qgemm.fast_forward(scaled)
    for i in range(3):
        assert torch.equal(scaled(x + i)["y"], x + i)
    assert len(graphs) == 2
    ours = scaled.forward
    scaled._old_forward, scaled.forward = ours, lambda x: ours(x)
    qgemm.fast_forward(scaled, enabled=False)
    assert scaled(x)["y"] is x, "still ours"
    scaled.forward = ours
    qgemm.fast_forward(scaled, enabled=False)
    assert scaled.forward is own


def test_copies_have_their_own(graphs: list[Any], scaled: Scaled, device: torch.device) -> None:
    x = inputs(3, device)
    qgemm.fast_forward(scaled)(x)
    copiers: list[Callable[[Any], Any]] = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
    for copied in copiers:
        other = copied(scaled)
        assert isinstance(other.forward, GraphedForward)
        other.factor = 5.0
        for _ in range(2):
            assert_runs_as_before(other, x)
            assert_runs_as_before(scaled, x)
        reference = weakref.ref(other.layer)
        gc.disable()
        del other
        assert reference() is None, "a circle keeps the model alive"
        gc.enable()
    assert len(graphs) == 3


@pytest.mark.parametrize("is_read", [False, True])
def test_a_replica_runs_its_own_parameters(is_read: bool, scaled: Scaled, device: torch.device) -> None:
    # As nn.DataParallel makes it for each GPU.
    x = inputs(3, device)
    expected = scaled(x)["y"]
    qgemm.fast_forward(scaled)
    model = pickle.loads(pickle.dumps(scaled)) if is_read else scaled
    replica = model._replicate_for_data_parallel()
    replica._modules = {"layer": copy.deepcopy(model.layer)}
    model.layer.weight.zero_()
    assert torch.equal(replica(x)["y"], expected)
    assert not torch.equal(model(x)["y"], expected)
    qgemm.fast_forward(model, False)
    assert not {"forward", "_replicate_for_data_parallel"} & set(vars(model))


def test_a_shallow_copy_that_outlives_the_model_says_what_to_do(scaled: Scaled, device: torch.device) -> None:
    x = inputs(3, device)
    model = copy.deepcopy(scaled)
    other = copy.copy(qgemm.fast_forward(model))
    assert torch.equal(other(x)["y"], scaled(x)["y"])
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match=r"copy\.copy.*fast_forward\(model\) on the copy"):
        other(x)
    assert torch.equal(qgemm.fast_forward(other)(x)["y"], scaled(x)["y"])


def test_the_signature_stays(scaled: Scaled) -> None:
    before = inspect.signature(scaled.forward)
    assert inspect.signature(qgemm.fast_forward(scaled).forward) == before


def test_compilers_see_the_model(graphs: list[Any], scaled: Scaled, device: torch.device) -> None:
    x = inputs(3, device)
    expected = scaled(x)["y"]
    qgemm.fast_forward(scaled)
    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x)["y"], expected)
    exported = torch.export.export(scaled, (x,)).module()
    assert torch.equal(exported(x)["y"], expected)
    assert not graphs


def test_a_second_thread_runs_as_before(graphs: list[Any], scaled: Scaled, device: torch.device) -> None:
    x, entered, left = inputs(3, device), threading.Event(), threading.Event()
    qgemm.fast_forward(scaled)(x)

    def wait(x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            left.wait(10)
        return nn.Linear.forward(scaled.layer, x)

    vars(scaled.layer)["forward"] = wait

    def run() -> None:
        with torch.no_grad():
            scaled(x)

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait(10)
    assert_runs_as_before(scaled, x)
    left.set()
    thread.join()
    assert_runs_as_before(scaled, x)


def test_fast_generate_is_as_without(graphs: list[Any], device: torch.device) -> None:
    model: Any = FAMILIES["llama"]().model.to(device)
    prompts = torch.arange(3, 24, device=device).reshape(3, 7)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(prompts, **options)
    qgemm.fast_generate(qgemm.fast_forward(model))
    assert torch.equal(model.generate(prompts, **options), expected)
