"""What each layer's quantization costs: against models in which that layer alone was swapped."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import Counter, UserDict
from typing import Any

import accelerate
import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from torch import Tensor, nn
from torch.nn import functional as F

import qgemm
from qgemm.calibration import LayerSensitivity, Sensitivity
from qgemm.calibration.sensitivity import sensitivity
from qgemm.model.selection import select_layers


def swapped_alone(model: nn.Module, record: LayerSensitivity, layers: set[str], batches: list[Any]) -> nn.Module:
    alone = copy.deepcopy(model)
    skip = sorted(layers - {record.name})
    calibration = batches if record.scheme == "int8-static" else None
    return qgemm.quantize_model(alone, record.scheme, skip=skip, calibration=calibration, progress=False)


def divergence(p_logits: Tensor, q_logits: Tensor) -> float:
    """The mean over tokens, by PyTorch's own function."""
    p, q = (logits.flatten(0, -2).double().log_softmax(-1) for logits in (p_logits, q_logits))
    return float(F.kl_div(q, p, log_target=True, reduction="batchmean"))


# Decoder, Conv1D, encoder and decoder, experts.
@pytest.mark.slow(quick=["llama"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "mixtral"])
def test_damage_is_that_of_swapping_one_layer(family: str) -> None:
    example = {**FAMILIES, **MIXTURES}[family]()
    model = example.model
    batches = [example.inputs, {name: value[:1, :5] for name, value in example.inputs.items()}]
    result = sensitivity(model, batches, ["int8", "int8-static"], progress=False)
    assert result.metric == "kl"
    with torch.no_grad():
        logits = [model(**batch).logits for batch in batches]
    assert result.tokens == sum(each.shape[:2].numel() for each in logits)
    layers = {layer.name for layer in result.records}
    assert layers == {r.name for r in qgemm.report(qgemm.quantize_model(copy.deepcopy(model))).quantized}
    assert {record.scheme for record in result.records} == {"int8", "int8-static"}
    for record in result.records[::5]:
        alone = swapped_alone(model, record, layers, batches)
        with torch.no_grad():
            parts = [
                divergence(p, alone(**b).logits) * len(p.flatten(0, -2)) for p, b in zip(logits, batches, strict=True)
            ]
        assert record.damage == pytest.approx(sum(parts) / result.tokens, rel=1e-6), record
        assert record.damage > 0
        assert 0.001 < record.layer_error < 0.1
        [swapped] = qgemm.report(alone).quantized
        assert (record.bytes_before, record.bytes_after) == (swapped.bytes_before, swapped.bytes_after)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    inside = sum({record.name: record.bytes_before for record in result.records}.values())
    assert result.other_bytes == sum(tensor.nbytes for tensor in tensors.values()) - inside


FOUR_BITS = ["int4", "int4-channel", "int4-32-int8", "nf4"]


def test_schemes_of_all_kinds() -> None:
    example = FAMILIES["llama"]()
    schemes = ["int8", "int8-static-asymmetric", "int8-hadamard", "int4", "int4-channel", "int8"]
    schemes += ["fp8", "fp8-block", "int8-weight", "int4-32-int8", "nf4", "mxfp8"]
    result = sensitivity(example.model, [example.inputs], schemes, skip="*self_attn*", progress=False)
    by_scheme = {scheme: [r.damage for r in result.records if r.scheme == scheme] for scheme in schemes}
    assert [len(damages) for damages in by_scheme.values()] == [6] * 11
    assert 0 < max(sum(by_scheme[scheme]) for scheme in schemes[:3]) < sum(by_scheme["int4"])
    assert sum(by_scheme["int8-weight"]) < sum(by_scheme["fp8"]) < min(sum(by_scheme[each]) for each in FOUR_BITS)
    checked = result.records[1::5]
    assert {record.scheme for record in checked} == set(schemes)
    for record in checked:
        alone = copy.deepcopy(example.model)
        skip = [r.name for r in result.records if r.name != record.name] + ["*self_attn*"]
        calibration = [example.inputs] if "static" in record.scheme else None
        qgemm.quantize_model(alone, record.scheme, skip=skip, calibration=calibration, progress=False)
        with torch.no_grad():
            expected = divergence(example.output(), alone(**example.inputs).logits)
        assert record.damage == pytest.approx(expected, rel=1e-5)


def test_experts_are_measured_once_for_both_schemes() -> None:
    example = MIXTURES["mixtral"]()
    result = sensitivity(example.model, [example.inputs], ["int8", "int8-static"], progress=False)
    assert [r.scheme for r in result.records if r.name.endswith("experts")] == ["int8"] * 2
    assert [r.scheme for r in result.records if r.name.endswith("q_proj")] == ["int8", "int8-static"] * 2


class Regression(nn.Module):
    """No logits; one layer is called twice, one only if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)
        self.side = nn.Linear(32, 32)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, with_side: bool = False) -> tuple[Tensor, str]:
        x = self.down(self.up(x).relu())
        x = self.down(self.up(x).relu())
        return (self.side(x) if with_side else x), "more"


def test_without_logits_it_is_the_error_of_the_output() -> None:
    model = Regression().train()
    model.up.eval()
    x, more = torch.randn(2, 5, 32), torch.randn(1, 3, 32)
    with warnings.catch_warnings(record=True) as caught:
        result = sensitivity(model, [(x,), more], progress=False)
    [warning] = caught
    assert "'side' saw no tokens, so they weren't measured" in str(warning.message)
    assert warning.filename == __file__
    assert (result.metric, result.tokens) == ("error", 13)
    assert [record.name for record in result.records] == ["up", "down"]
    assert result.other_bytes == sum(p.nbytes for p in model.side.parameters())
    for record in result.records:
        alone = swapped_alone(model, record, {"up", "down", "side"}, [])
        with torch.no_grad():
            outputs = [(model(batch)[0].double(), alone(batch)[0].double()) for batch in (x, more)]
            layer, quantized = model.get_submodule(record.name), alone.get_submodule(record.name)
        lost = sum((p - q).square().sum() for p, q in outputs)
        whole = sum(p.square().sum() for p, _ in outputs)
        assert record.damage == pytest.approx(float((lost / whole).sqrt()), rel=1e-5)
        assert type(quantized).__name__ == "QuantLinear"
        assert type(layer).__name__ == "Linear"
    assert (model.training, model.up.training) == (True, False)


def test_the_layers_own_error_is_on_its_float_input() -> None:
    model, x = Regression().eval(), torch.randn(2, 5, 32)
    inputs: list[Tensor] = []
    handle = model.down.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        model(x)
    handle.remove()
    [record] = sensitivity(model, [x], skip=["up", "side"], progress=False).records
    quantized = qgemm.QuantLinear.from_linear(model.down)
    with torch.no_grad():
        # The second call's input is after a quantized first one.
        first = (quantized(inputs[0]) - model.down(inputs[0])).norm() / model.down(inputs[0]).norm()
    assert record.layer_error == pytest.approx(float(first), rel=0.2)


def test_zeros_are_not_damaged() -> None:
    model = Regression()
    for parameter in model.down.parameters():
        nn.init.zeros_(parameter)
    [record] = sensitivity(model, [torch.randn(2, 5, 32)], skip=["up", "side"], progress=False).records
    assert (record.damage, record.layer_error) == (0.0, 0.0)


def test_tokens_that_are_masked_do_not_count() -> None:
    model, x = Regression().eval(), torch.randn(2, 5, 32)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    masked = sensitivity(model, [{"x": x, "attention_mask": mask}], skip="side", progress=False)
    # Rows don't depend on each other here.
    alone = sensitivity(model, [x[:1, :3], x[1:]], skip="side", progress=False)
    assert masked.tokens == alone.tokens == 8
    for one, other in zip(masked.records, alone.records, strict=True):
        assert one.damage == pytest.approx(other.damage, rel=1e-5)


def test_a_padded_decoder_counts_by_its_own_mask() -> None:
    example = FAMILIES["t5"]()
    model, ids = example.model, torch.randint(2, 97, (2, 6))
    mask = torch.ones_like(ids)
    mask[0, 4:] = mask[1, 5:] = 0
    # Of the same shape, and of nothing that is measured.
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids.flip(0)}
    batch["decoder_attention_mask"] = mask
    name = "decoder.block.1.layer.2.DenseReluDense.wo"
    layers = {layer.name for layer in select_layers(model, None) if not layer.reason}
    result = sensitivity(model, [batch], skip=sorted(layers - {name}), progress=False)
    assert result.tokens == int(mask.sum()) == 9
    [record] = result.records
    alone = swapped_alone(model, record, layers, [])
    with torch.no_grad():
        p, q = (each(**batch).logits[mask.bool()] for each in (model, alone))
    assert record.damage == pytest.approx(divergence(p, q), rel=1e-6)


class Classifier(nn.Module):
    """Logits, after which there may be a class that never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor, masked: bool) -> dict[str, Tensor]:
        logits = self.down(self.up(x).relu())
        return {"logits": F.pad(logits, (0, 1), value=-torch.inf) if masked else logits}


def test_classes_that_never_come_count_nothing() -> None:
    model, x = Classifier(), torch.randn(3, 5, 32)
    plain, masked = (sensitivity(model, [(x, each)], progress=False) for each in (False, True))
    assert [record.damage for record in masked.records] == pytest.approx([r.damage for r in plain.records])
    assert all(0 < record.damage < 1 for record in masked.records)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_stays_as_it_is(fails: bool) -> None:
    example = FAMILIES["llama"]()
    model = example.model.train()
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    modules = dict(model.named_modules())
    attributes = {name: set(vars(module)) for name, module in modules.items()}
    calls = []

    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(None)
        assert not any(each.training for each in module.modules())
        if fails and len(calls) == 8:
            raise RuntimeError("mine")

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    if fails:
        with pytest.raises(RuntimeError, match="mine"):
            sensitivity(model, [example.inputs], progress=False)
    else:
        result = sensitivity(model, [example.inputs], progress=False)
        assert len(calls) <= 4 + len(result.records)  # three of them find blocks
    handle.remove()
    assert dict(model.named_modules()) == modules
    assert {name: set(vars(module)) for name, module in modules.items()} == attributes
    assert all(module.training for module in modules.values())
    now = model.state_dict(keep_vars=True)
    assert all(now[name] is value and torch.equal(value, copied) for name, (value, copied) in before.items())


def test_blocks_ahead_of_a_layer_do_not_run_again() -> None:
    example = FAMILIES["llama"]()
    calls: Counter[int] = Counter()

    def count(place: int) -> Any:
        return lambda module, args: calls.update([place])

    for place, block in enumerate(example.model.model.layers):
        block.mlp.register_forward_pre_hook(count(place))
    result = sensitivity(example.model, [example.inputs] * 3, progress=False)
    # Three batches, seven layers in each of two blocks.
    assert len(result.records) == 14
    assert calls[1] - calls[0] == 3 * 7


class InPlace(nn.Module):
    """Blocks that change what the one before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
        return x


def test_what_blocks_return_may_be_changed() -> None:
    model, x = InPlace().eval(), torch.randn(4, 32)
    for record in sensitivity(model, [x.clone(), -x], ["int8", "int4"], progress=False).records:
        alone = swapped_alone(model, record, {f"blocks.{n}.0" for n in range(3)}, [])
        with torch.no_grad():
            outputs = [(model(batch.clone()), alone(batch.clone())) for batch in (x, -x)]
        lost = sum((p - q).double().square().sum() for p, q in outputs)
        whole = sum(p.double().square().sum() for p, _ in outputs)
        assert record.damage == pytest.approx(float((lost / whole).sqrt()), rel=1e-4)


class Sharing(nn.Module):
    """Blocks of which the later ones take what the first one has put into a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Taking() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shared = UserDict[str, Tensor]()
        for block in self.blocks:
            x = block(x, shared=shared)
        return x


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, shared: Any) -> Tensor:
        out: Tensor = x + self.linear(shared.setdefault("first", x.tanh()))
        return out


def test_what_blocks_put_into_a_dictionary_is_there() -> None:
    model, x = Sharing().eval(), torch.randn(4, 32)
    for record in sensitivity(model, [x], "int4-channel", progress=False).records:
        alone = swapped_alone(model, record, {f"blocks.{n}.linear" for n in range(3)}, [])
        with torch.no_grad():
            wanted = model(x)
            assert record.damage == pytest.approx(float((alone(x) - wanted).norm() / wanted.norm()), rel=1e-4)


def test_one_quantized_layer_at_a_time() -> None:
    example = FAMILIES["llama"]()
    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    counts = set()
    real = qgemm.QuantLinear.forward

    def count(self: Any, *args: Any) -> Tensor:
        alive.add(self)
        counts.add(len(alive))
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qgemm.QuantLinear, "forward", count)
        sensitivity(example.model, [example.inputs], progress=False, skip="*mlp*")
    assert counts == {1}


def test_hooks_and_offloading_work_as_they_do() -> None:
    model, x = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)).eval(), torch.randn(4, 32)
    model[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    plain = sensitivity(model, [x], ["int8", "int8-static"], progress=False)
    accelerate.cpu_offload(model, torch.device("cpu"))
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    assert sensitivity(model, [x], ["int8", "int8-static"], progress=False) == plain
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_what_gives_no_number_is_infinitely_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qgemm.QuantLinear, "forward", lambda self, x: F.linear(x, self.stored("weight").float()) / 0)
    result = sensitivity(Regression(), [torch.randn(2, 5, 32)], skip="side", progress=False)
    assert [record.damage for record in result.records] == [float("inf")] * 2
    assert Sensitivity.from_dict(result.to_dict()) == result


def test_what_is_refused() -> None:
    model, x = Regression(), torch.randn(2, 5, 32)
    with pytest.raises(ValueError, match="data has no batch"):
        sensitivity(model, [])
    with pytest.raises(TypeError, match="put a single batch into a list"):
        sensitivity(model, x)
    with pytest.raises(ValueError, match="scheme is 'int3'"):
        sensitivity(model, [x], "int3")
    for scheme, message in (
        ("int8-outliers-16", "needs outlier columns"),
        ("int8-static-hadamard", "needs scales of rotated"),
    ):
        with pytest.raises(ValueError, match=f"scheme '{scheme}' {message}"):
            sensitivity(model, [x], ["int8", scheme])
    with pytest.raises(ValueError, match="the model's output holds NaN on batch 1"):
        sensitivity(model, [x, x / 0 - x / 0], progress=False)
