"""Choices under a budget, against all choices that there are."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from torch import nn

import qgemm
from qgemm.calibration import GPTQ, LayerSensitivity, Sensitivity
from qgemm.calibration.budget import Budget, choose_schemes
from qgemm.calibration.sensitivity import sensitivity

OTHER = 1000
SCHEMES = ("int8", "int4")


def measured(count: int, seed: int, metric: str = "kl", sizes: tuple[int, ...] = (400, 640, 1000)) -> Sensitivity:
    """Layers of a few sizes; of two in three, the smaller scheme does more damage."""
    generator = random.Random(seed)
    records = []
    for index in range(count):
        before = generator.choice(sizes)
        for scheme, part in zip(SCHEMES, (2, 4), strict=True):
            damage = generator.random() * part
            records.append(LayerSensitivity(f"layer{index}", scheme, damage, 0.01, before, before // part))
    return Sensitivity(metric, 100, OTHER, tuple(records))


def totals(found: Sensitivity, schemes: dict[str, str | None]) -> tuple[int, float]:
    """Bytes, and the damage in the unit of the budget."""
    bytes_, damages = found.other_bytes, []
    for name, scheme in schemes.items():
        records = {record.scheme: record for record in found.records if record.name == name}
        bytes_ += records[SCHEMES[0]].bytes_before if scheme is None else records[scheme].bytes_after
        damages.append(0.0 if scheme is None else records[scheme].damage)
    return bytes_, sum(damages) if found.metric == "kl" else sum(d * d for d in damages) ** 0.5


def all_choices(found: Sensitivity) -> Iterator[tuple[int, float]]:
    names = list(dict.fromkeys(record.name for record in found.records))
    for chosen in itertools.product((None, *SCHEMES), repeat=len(names)):
        yield totals(found, dict(zip(names, chosen, strict=True)))


@pytest.mark.parametrize("seed", range(3))
def test_the_least_damage_within_bytes(seed: int) -> None:
    found = measured(6, seed)
    everything = sorted(all_choices(found))
    for budget in (everything[0][0], everything[40][0] + 1, everything[300][0], everything[-1][0] + 10**6):
        chosen = choose_schemes(found, Budget(bytes=budget))
        bytes_, damage = totals(found, chosen)
        assert bytes_ <= budget
        assert damage == pytest.approx(min(d for b, d in everything if b <= budget))
    assert set(chosen.values()) == {None}  # all fits in float


@pytest.mark.parametrize("metric", ["kl", "error"])
def test_the_fewest_bytes_within_damage(metric: str) -> None:
    found = measured(6, 0, metric)
    everything = sorted(all_choices(found))
    for limit in (0.0, 0.5, 2.0, 5.0, 1000.0):
        chosen = choose_schemes(found, Budget(kl=limit) if metric == "kl" else Budget(error=limit))
        bytes_, damage = totals(found, chosen)
        assert damage <= limit
        assert bytes_ == min(b for b, d in everything if d <= limit)
    assert None not in chosen.values()


def test_a_large_model_comes_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgemm.calibration.budget._MOST_PAIRS", 2048)
    # All different, so that sums are too; and small ones, whose sums hardly differ.
    sizes = (*random.Random(1).sample(range(10**6, 10**8), 100), *[8] * 30)
    found = measured(120, 5, sizes=sizes)
    whole = OTHER + sum(record.bytes_before for record in found.records if record.scheme == "int8")
    chosen = choose_schemes(found, Budget(bytes=whole // 2))
    assert choose_schemes(found, Budget(bytes=whole // 2)) == chosen
    bytes_, damage = totals(found, chosen)
    assert bytes_ <= whole // 2
    assert damage <= 1.01 * relaxed(found, whole // 2)  # measured: 1.002
    least = OTHER + sum(record.bytes_after for record in found.records if record.scheme == "int4")
    assert None not in choose_schemes(found, Budget(bytes=least)).values()


def relaxed(found: Sensitivity, budget: int) -> float:
    """A bound that no choice beats: the dual of the problem, its price of a byte found by bisection."""
    names = list(dict.fromkeys(record.name for record in found.records))
    options = {name: [(0.0, r.bytes_before) for r in found.records if r.name == name][:1] for name in names}
    for record in found.records:
        options[record.name].append((record.damage, record.bytes_after))

    def bound(price: float) -> float:
        return sum(min(d + price * b for d, b in each) for each in options.values()) - price * (budget - OTHER)

    prices = [10 ** (exponent / 50) for exponent in range(-550, -250)]
    return max(bound(price) for price in prices)


def test_layers_that_give_no_number_stay_in_float() -> None:
    records = (
        LayerSensitivity("a", "int8", float("inf"), 0.01, 400, 100),
        LayerSensitivity("b", "int8", 0.1, 0.01, 400, 100),
        LayerSensitivity("c", "int8", 0.1, 0.01, 10, 14),  # larger than it was
    )
    found = Sensitivity("kl", 100, OTHER, records)
    assert choose_schemes(found, Budget(kl=5.0)) == {"a": None, "b": "int8", "c": None}
    with pytest.raises(ValueError, match=r"the model takes at least 1,510 bytes \(1.51 kB\) .* the budget is 1,500"):
        choose_schemes(found, Budget(bytes=1500))
    assert choose_schemes(found, Budget(bytes=1510))["b"] == "int8"


def test_what_does_no_damage_is_quantized() -> None:
    records = (LayerSensitivity("a", "int8", 0.0, 0.0, 400, 100), LayerSensitivity("a", "int4", 0.0, 0.0, 400, 50))
    found = Sensitivity("kl", 100, OTHER, records)
    for budget in (Budget(bytes=10**6), Budget(kl=0.0)):
        assert choose_schemes(found, budget) == {"a": "int4"}
    found = Sensitivity("error", 100, OTHER, (*records, LayerSensitivity("b", "int8", 0.01, 0.0, 400, 100)))
    assert choose_schemes(found, Budget(error=0.0)) == {"a": "int4", "b": None}


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give exactly one, not \['bytes', 'kl'\]"):
        Budget(bytes=1, kl=1.0)
    with pytest.raises(ValueError, match="give exactly one, not none"):
        Budget()
    with pytest.raises(ValueError, match=r"kl is -0.1; it must be 0 or more"):
        Budget(kl=-0.1)
    with pytest.raises(ValueError, match="the budget limits kl, but error was measured"):
        choose_schemes(measured(2, 0, "error"), Budget(kl=0.1))
    with pytest.raises(ValueError, match="the budget limits error, but kl was measured"):
        choose_schemes(measured(2, 0), Budget(error=0.1))


def nbytes(model: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_model_within_bytes(family: str, tmp_path: Path) -> None:
    example = {**FAMILIES, **MIXTURES}[family]()
    model, batches = example.model, [example.inputs]
    schemes = ["int8", "int8-static", "int4"]
    found = sensitivity(model, batches, schemes, progress=False)
    smallest = nbytes(qgemm.quantize_model(copy.deepcopy(model), "int4"))
    budget = Budget(bytes=(7 * smallest + nbytes(model)) // 8)
    chosen = choose_schemes(found, budget)
    assert len(set(chosen.values())) > 1

    quantized = qgemm.quantize_model(
        copy.deepcopy(model), schemes, budget=budget, calibration=iter(batches), progress=False
    )
    assert nbytes(quantized) <= budget.bytes
    assert nbytes(quantized) == totals_of(found, chosen)
    report = qgemm.report(quantized)
    assert report.bytes_after + found.other_bytes == nbytes(quantized) + sum(
        record.bytes_before for record in report.records if record.name not in chosen
    )
    for record in report.records:
        scheme = chosen.get(record.name)
        damages = {each.scheme: each.damage for each in found.records if each.name == record.name}
        if record.name not in chosen:
            assert not record.reason.startswith("budget")
        elif scheme is None:
            least, of = min((damage, scheme) for scheme, damage in damages.items())
            assert (record.action, record.reason) == ("float", f"budget: kl {least:.2g} alone under {of!r}")
        else:
            assert (record.action, record.note.split("; ")[0]) == (scheme, f"budget: kl {damages[scheme]:.2g} alone")
    # What was measured before gives the same, and it is stored as it is.
    again = qgemm.quantize_model(
        copy.deepcopy(model), schemes, budget=budget, sensitivity=found, calibration=batches, progress=False
    )
    qgemm.save_quantized(again, tmp_path / "saved")
    loaded = qgemm.load_quantized(tmp_path / "saved")
    with torch.no_grad():
        expected = quantized(**example.inputs).logits
        assert torch.equal(again(**example.inputs).logits, expected)
        assert torch.equal(loaded(**example.inputs).logits, expected)


def test_experts_have_the_bits_of_the_scheme() -> None:
    example = MIXTURES["mixtral"]()
    smallest = nbytes(qgemm.quantize_model(copy.deepcopy(example.model), "int4"))
    budget = Budget(bytes=smallest)
    model = qgemm.quantize_model(example.model, "int4", budget=budget, calibration=[example.inputs], progress=False)
    assert nbytes(model) == smallest
    assert {record.action for record in qgemm.report(model).quantized} == {"int4"}


def totals_of(found: Sensitivity, chosen: dict[str, str | None]) -> int:
    after = {(record.name, record.scheme): record.bytes_after for record in found.records}
    before = {record.name: record.bytes_before for record in found.records}
    return found.other_bytes + sum(before[n] if s is None else after[n, s] for n, s in chosen.items())


def test_a_model_within_a_divergence_and_a_recipe() -> None:
    example = FAMILIES["llama"]()
    found = sensitivity(example.model, [example.inputs], progress=False)
    limit = sum(record.damage for record in found.records) / 3
    plain, by_gptq = (
        qgemm.quantize_model(
            copy.deepcopy(example.model),
            budget=Budget(kl=limit),
            sensitivity=found,
            calibration=None if recipe is None else [example.inputs],
            recipe=recipe,
            progress=False,
        )
        for recipe in (None, [GPTQ()])
    )
    actions = [[record.action for record in qgemm.report(model).records] for model in (plain, by_gptq)]
    assert actions[0] == actions[1]
    assert {"int8", "float"} == set(actions[0])
    with torch.no_grad():
        logits = [model(**example.inputs).logits.log_softmax(-1).double() for model in (example.model, plain)]
    divergence = float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean())
    # Damages add up roughly.
    assert limit / 2 < divergence < 2 * limit


def test_layers_that_saw_no_tokens_stay_in_float() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model.add_module("side", nn.Linear(32, 32))
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qgemm.quantize_model(model, budget=Budget(error=0.5), calibration=[torch.randn(4, 32)], progress=False)
    assert [record.action for record in qgemm.report(model).records] == ["int8", "int8", "float"]
    assert qgemm.report(model).records[2].reason == "budget: it saw no tokens, so nothing is known of it"


def test_skipped_layers_count_as_they_are() -> None:
    example = FAMILIES["llama"]()
    found = sensitivity(example.model, [example.inputs], progress=False)
    smallest = nbytes(qgemm.quantize_model(copy.deepcopy(example.model), skip="*mlp*"))
    budget = Budget(bytes=smallest)
    model = qgemm.quantize_model(example.model, skip="*mlp*", budget=budget, sensitivity=found, progress=False)
    assert nbytes(model) == smallest


def test_what_quantize_model_refuses_of_budgets() -> None:
    example = FAMILIES["llama"]()
    model, batches = example.model, [example.inputs]
    found = sensitivity(model, batches, skip="*layers.1*", progress=False)
    budget, all_of_it = Budget(kl=1.0), Budget(bytes=10**9)
    other = Sensitivity("kl", 1, 0, (LayerSensitivity("other", "int8", 0.1, 0.1, 4, 1),))
    for arguments, message in (
        ({"scheme": ["int8", "int4"]}, r"scheme is \['int8', 'int4'\]: pass one scheme, or a budget"),
        ({"scheme": [], "budget": budget}, "scheme is empty"),
        ({"sensitivity": found}, "sensitivity is given without a budget"),
        ({"budget": budget}, "budget needs batches to run the model on: pass them as calibration"),
        ({"budget": budget, "sensitivity": other}, "sensitivity has 'other', but the model has no such"),
        ({"budget": budget, "sensitivity": found, "scheme": "int4"}, "sensitivity wasn't measured under 'int4'"),
        ({"budget": all_of_it, "sensitivity": found}, "the budget leaves all layers in float, .*: lower it"),
        ({"budget": Budget(bytes=10), "sensitivity": found}, "the model takes at least .* bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            qgemm.quantize_model(model, progress=False, **arguments)
    assert not any(isinstance(module, qgemm.QuantLinear) for module in model.modules())


def test_a_budget_over_formats_of_weights() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 16)),
        torch.randn(32, 256),
    )
    schemes = ["fp8-weight", "int4-32-asymmetric", "nvfp4", "mxfp4"]
    found = sensitivity(model, [x], schemes, progress=False)
    by_scheme = {scheme: sum(each.damage for each in found.records if each.scheme == scheme) for scheme in schemes}
    assert 0 < by_scheme["fp8-weight"] < min(by_scheme[scheme] for scheme in schemes[1:])
    sizes = [nbytes(qgemm.quantize_model(copy.deepcopy(model), scheme)) for scheme in ("fp8-weight", "mxfp4")]
    limit = (sizes[0] + 3 * sizes[1]) // 4
    qgemm.quantize_model(model, schemes, budget=Budget(bytes=limit), sensitivity=found, progress=False)
    assert nbytes(model) <= limit
    assert {layer.scheme.weight.format.bits for layer in model if not isinstance(layer, nn.ReLU)} == {4, 8}
