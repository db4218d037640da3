"""Choices under a budget, against all choices that there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from qgemm.calibration.budget import Budget, choose_schemes
from qgemm.calibration.sensitivity import LayerSensitivity, Sensitivity

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


def totals(sensitivity: Sensitivity, schemes: dict[str, str | None]) -> tuple[int, float]:
    """Bytes, and the damage in the unit of the budget."""
    bytes_, damages = sensitivity.other_bytes, []
    for name, scheme in schemes.items():
        records = {record.scheme: record for record in sensitivity.records if record.name == name}
        bytes_ += records[SCHEMES[0]].bytes_before if scheme is None else records[scheme].bytes_after
        damages.append(0.0 if scheme is None else records[scheme].damage)
    return bytes_, sum(damages) if sensitivity.metric == "kl" else sum(d * d for d in damages) ** 0.5


def all_choices(sensitivity: Sensitivity) -> Iterator[tuple[int, float]]:
    names = list(dict.fromkeys(record.name for record in sensitivity.records))
    for chosen in itertools.product((None, *SCHEMES), repeat=len(names)):
        yield totals(sensitivity, dict(zip(names, chosen, strict=True)))


@pytest.mark.parametrize("seed", range(3))
def test_the_least_damage_within_bytes(seed: int) -> None:
    sensitivity = measured(6, seed)
    everything = sorted(all_choices(sensitivity))
    for budget in (everything[0][0], everything[40][0] + 1, everything[300][0], everything[-1][0] + 10**6):
        chosen = choose_schemes(sensitivity, Budget(bytes=budget))
        bytes_, damage = totals(sensitivity, chosen)
        assert bytes_ <= budget
        assert damage == pytest.approx(min(d for b, d in everything if b <= budget))
    assert set(chosen.values()) == {None}  # all fits in float


@pytest.mark.parametrize("metric", ["kl", "error"])
def test_the_fewest_bytes_within_damage(metric: str) -> None:
    sensitivity = measured(6, 0, metric)
    everything = sorted(all_choices(sensitivity))
    for limit in (0.0, 0.5, 2.0, 5.0, 1000.0):
        chosen = choose_schemes(sensitivity, Budget(kl=limit) if metric == "kl" else Budget(error=limit))
        bytes_, damage = totals(sensitivity, chosen)
        assert damage <= limit
        assert bytes_ == min(b for b, d in everything if d <= limit)
    assert None not in chosen.values()


def test_a_large_model_comes_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgemm.calibration.budget._MOST_PAIRS", 2048)
    # All different, so that sums are too; and small ones, whose sums hardly differ.
    sizes = (*random.Random(1).sample(range(10**6, 10**8), 100), *[8] * 30)
    sensitivity = measured(120, 5, sizes=sizes)
    whole = OTHER + sum(record.bytes_before for record in sensitivity.records if record.scheme == "int8")
    chosen = choose_schemes(sensitivity, Budget(bytes=whole // 2))
    assert choose_schemes(sensitivity, Budget(bytes=whole // 2)) == chosen
    bytes_, damage = totals(sensitivity, chosen)
    assert bytes_ <= whole // 2
    assert damage <= 1.01 * relaxed(sensitivity, whole // 2)  # measured: 1.002
    least = OTHER + sum(record.bytes_after for record in sensitivity.records if record.scheme == "int4")
    assert None not in choose_schemes(sensitivity, Budget(bytes=least)).values()


def relaxed(sensitivity: Sensitivity, budget: int) -> float:
    """A bound that no choice beats: the dual of the problem, its price of a byte found by bisection."""
    names = list(dict.fromkeys(record.name for record in sensitivity.records))
    options = {name: [(0.0, r.bytes_before) for r in sensitivity.records if r.name == name][:1] for name in names}
    for record in sensitivity.records:
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
    sensitivity = Sensitivity("kl", 100, OTHER, records)
    assert choose_schemes(sensitivity, Budget(kl=5.0)) == {"a": None, "b": "int8", "c": None}
    with pytest.raises(ValueError, match=r"the model takes 1,510 bytes \(1.5 KiB\) at least .* the budget is 1,500"):
        choose_schemes(sensitivity, Budget(bytes=1500))
    assert choose_schemes(sensitivity, Budget(bytes=1510))["b"] == "int8"


def test_what_does_no_damage_is_quantized() -> None:
    records = (LayerSensitivity("a", "int8", 0.0, 0.0, 400, 100), LayerSensitivity("a", "int4", 0.0, 0.0, 400, 50))
    sensitivity = Sensitivity("kl", 100, OTHER, records)
    for budget in (Budget(bytes=10**6), Budget(kl=0.0)):
        assert choose_schemes(sensitivity, budget) == {"a": "int4"}


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give one, not \['bytes', 'kl'\]"):
        Budget(bytes=1, kl=1.0)
    with pytest.raises(ValueError, match="give one, not none"):
        Budget()
    with pytest.raises(ValueError, match=r"kl is -0.1; it must be 0 or more"):
        Budget(kl=-0.1)
    with pytest.raises(ValueError, match="the budget is of kl, but error was measured"):
        choose_schemes(measured(2, 0, "error"), Budget(kl=0.1))
    with pytest.raises(ValueError, match="the budget is of error, but kl was measured"):
        choose_schemes(measured(2, 0), Budget(error=0.1))
