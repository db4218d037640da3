"""What a fused layer is allowed to be off by: roundings, and hardly another scale."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgemm import QuantLinear, fuse, fusion_report
from qgemm.fusion.siblings import SiblingWatch
from qgemm.fusion.structure import arguments_of, find_candidates
from qgemm.fusion.verify import MAX_ERROR, called_again, error_of, random_values, record_calls, relative_error
from qgemm.kernels.norms import Norm
from qgemm.nn.blocks.binding import fused_of
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("granite", lambda fused: replace(fused, multiplier=1.0)),
        ("granite", lambda fused: replace(fused, multiplier=0.221)),
        ("gemma4", lambda fused: replace(fused, scale=None)),
        ("nemotron", lambda fused: with_norms(fused, "layer")),
    ],
    ids=["no factor", "another factor", "no scale of the layer", "another norm"],
)
def test_what_a_layer_multiplies_by_is_seen(family: str, wrong: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """Also in a new model, where a layer's scale is 1 and norms' weights are alike."""
    example = quantized(family)
    model: Any = example.model.eval().to(dtype)
    layer = model.model.layers[1]
    with record_calls([layer], SiblingWatch({})) as calls:
        example.output()
    with random_values(layer):
        call = called_again(layer, calls[layer], arguments_of(layer))
        candidates = find_candidates(layer, call).fused
        assert min(error_of(each, call) for each in candidates) == 0
        assert all(error_of(wrong(each), call) > MAX_ERROR for each in candidates)


def with_norms(fused: Any, kind: str) -> Any:
    """``fused`` with norms of another ``kind``."""

    def other(step: Any) -> Any:
        return replace(step, norm=replace(step.norm, norm=Norm(kind, step.norm.norm.eps)))

    return replace(fused, steps=tuple(map(other, fused.steps)))


def _with_imprecise_activations() -> Any:
    """A GPT-2 whose activation, ``gelu_new``, rounds off a tenth of its small values."""
    model: Any = quantized("gpt2").model.bfloat16()
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_fc.bias[:] = -3.0
            block.mlp.c_fc.weight_scale *= 0.1
            block.mlp.c_proj.weight_scale *= 100.0  # so that the MLP outweighs attention
    return model


def test_roundings_of_the_layer_s_own_activation_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _with_imprecise_activations()
    fuse(model)
    assert fused_parts(model) == (BOTH, BOTH)
    branch = fused_of(model.transformer.h[0]).steps[1].branch
    assert branch.activation_name == "gelu_tanh"
    # Without that, they would be too much; and an activation that the model hasn't is too much in any case.
    fusing = sys.modules["qgemm.fusion.fuse"]  # the package has a function of that name
    monkeypatch.setattr(fusing, "error_beside_activations", lambda *given: float("inf"))
    assert () in fused_parts(fuse(model))
    monkeypatch.undo()
    for other in ("relu", "silu"):
        monkeypatch.setattr("qgemm.fusion.branches.find_activation", lambda activation: other)  # noqa: B023
        assert fused_parts(fuse(model)) == ((), ())


def test_a_scale_counts_for_more_than_roundings() -> None:
    generator = torch.Generator().manual_seed(0)
    x, added, noise = (torch.randn(3, 5, 64, generator=generator) for _ in range(3))
    added[0, 0] = 0  # which has no scale
    for wrong, error in ((0.015 * noise, 0.015), (0.0015 * added, 0.015), (-0.003 * added, 0.03), (0 * added, 0.0)):
        assert relative_error(x + added + wrong, x + added, x) == pytest.approx(error, rel=0.15, abs=1e-6)
        assert relative_error(added + wrong, added) == pytest.approx(error, rel=0.15, abs=1e-6)
    off = added.clone()
    off[2, :3] *= 1.01  # three tokens of fifteen
    assert relative_error(off, added) < MAX_ERROR
    assert relative_error(off * float("nan"), added) == float("inf")


class Scaled(nn.Module):
    """``scale * hidden_states``."""

    def forward(self, hidden_states: Tensor, scale: float = 1.0, past_key_values: Any = None, **others: Any) -> Tensor:
        return scale * others.get("old_name", hidden_states)


class Calls(nn.Module):
    """Calls its layer once, in one of several ways."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = Scaled()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.layer, x).zero_()  # in place, as code around a layer may


@pytest.mark.parametrize(
    ("way", "others"),
    [
        (lambda layer, x: layer(x), {}),
        (lambda layer, x: layer(x, 2.0), {"scale": 2.0}),
        (lambda layer, x: layer(x, scale=2.0, past_key_values=None), {"scale": 2.0}),
        (lambda layer, x: layer(x, 2.0, "cache"), {"scale": 2.0}),
        (lambda layer, x: layer(scale=2.0, hidden_states=x), {"scale": 2.0}),
        (lambda layer, x: layer(None, 2.0, old_name=x), None),
    ],
)
def test_a_call_is_recorded_by_names(way: Callable[..., Tensor], others: dict[str, Any] | None) -> None:
    model, x = Calls(way), torch.ones(2, 3)
    with record_calls([model.layer], SiblingWatch({})) as calls:
        model(x)
    assert not model.layer._forward_hooks
    if others is None:
        assert calls == {}
        return
    (call,) = calls.values()
    assert call.x is x
    assert call.others == others
    assert torch.equal(call.output, others.get("scale", 1.0) * x)


def test_values_that_show_nothing_are_others_for_a_while() -> None:
    layer = nn.Module()
    values = {"ones": torch.ones(4), "zeros": torch.zeros(4), "zero": torch.zeros(1), "halves": torch.full((4,), 0.5)}
    for name, value in values.items():
        layer.register_parameter(name, nn.Parameter(value.clone(), requires_grad=name == "ones"))
        layer.register_buffer(f"{name}_buffer", value.to(torch.bfloat16))
    left = {"spread": torch.tensor([1.0, 2.0]), "other": torch.tensor(0.5), "empty": torch.empty(0)}
    for name, value in left.items():
        layer.register_parameter(name, nn.Parameter(value))
    layer.register_buffer("numbers", torch.ones(4, dtype=torch.int64))
    layer.register_buffer("made", torch.ones(4), persistent=False)
    layer.quantized = QuantLinear.from_linear(nn.Linear(16, 16))
    layer.quantized.bias.data.zero_()
    before = dict([*layer.named_parameters(), *layer.named_buffers()])
    copies = {name: value.clone() for name, value in before.items()}
    with random_values(layer) as are_random:
        assert are_random
        now = dict([*layer.named_parameters(), *layer.named_buffers()])
        others = {name for name, value in now.items() if not torch.equal(value, copies[name])}
        assert others == {*values, *(f"{name}_buffer" for name in values)}
        assert all(now[name].dtype == copies[name].dtype for name in now)
        for name in others:
            assert 0.2 < now[name].min() <= now[name].max() < 2
            assert len(now[name].unique()) == now[name].numel()
    after = dict([*layer.named_parameters(), *layer.named_buffers()])
    assert all(after[name] is value and torch.equal(value, copies[name]) for name, value in before.items())
    with random_values(layer.quantized) as are_random:
        assert not are_random
