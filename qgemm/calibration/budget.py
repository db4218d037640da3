"""``choose_schemes``: a scheme for every layer of a model, within a budget of bytes or damage.

Given what quantizing each layer alone does (``sensitivity``), each layer gets a scheme, or none, which leaves it in
float: with the minimum damage that fits into the bytes, or in the fewest bytes that do no more damage.

The layers' damages are assumed to add up: divergences as they are, relative errors in squares, as independent errors
do. That holds only roughly. In a 16-bit model the sum exceeds the real damage, by 2 to 6 times in a small one: any
change, however small, makes later layers round differently, and every layer's damage includes that. So measure the
result.

This is a knapsack with one choice per layer. It is solved layer by layer, over all pairs of bytes and damage that no
other pair beats in both. That is exact as long as there are few pairs, as in models of equal blocks. Of more than
16,384 pairs that many are kept: the one with the minimum damage in each of as many equal ranges of bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgemm.calibration.sensitivity_result import ERROR, KL, LayerSensitivity, Sensitivity
from qgemm.checkpoint.layout import parse_size
from qgemm.model.selection import listed
from qgemm.model.survey import Layer
from qgemm.scheme import QuantScheme
from qgemm.tables import size

_MOST_PAIRS = 1 << 14


@dataclass(frozen=True)
class Budget:
    """The maximum size or loss of a quantized model: exactly one of these.

    - ``bytes``: the size of all parameters and buffers: a number, or text such as ``"2GB"``, which is converted to one.
    - ``kl``: the KL divergence of the logits, in nats per token, estimated as the sum of the layers' divergences.
    - ``error``: for a model without logits, the relative error of the output, estimated as the root of the sum of the
      layers' squared errors.
    """

    bytes: int | str | None = None
    kl: float | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError`` unless exactly one is given, and it is a number of at least 0."""
        if isinstance(self.bytes, str):
            object.__setattr__(self, "bytes", parse_size(self.bytes, "bytes"))
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"a budget limits bytes, kl or error: give exactly one, not {sorted(given) or 'none'}")
        ((name, value),) = given.items()
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise ValueError(f"{name} is {value!r}; it must be 0 or more")


def choose_schemes(sensitivity: Sensitivity, budget: Budget) -> dict[str, str | None]:
    """Chooses a scheme for each layer in ``sensitivity``: returns its name, or None for float. Deterministic.

    Raises ``ValueError`` if no choice fits into ``budget.bytes``, or if the budget limits ``kl`` but errors were
    measured, or vice versa.
    """
    for name in (KL, ERROR):
        if getattr(budget, name) is not None and sensitivity.metric != name:
            raise ValueError(f"the budget limits {name}, but {sensitivity.metric} was measured: give a budget for that")
    options: dict[str, list[LayerSensitivity]] = defaultdict(list)
    for record in sensitivity.records:
        options[record.name].append(record)
    pairs = _Pairs(sensitivity.other_bytes)
    for records in options.values():
        # Float is the first option.
        pairs.extend(
            [records[0].bytes_before, *(record.bytes_after for record in records)],
            [0.0, *(added_damage(record, sensitivity.metric) for record in records)],
        )
    schemes = ([None, *(record.scheme for record in records)] for records in options.values())
    return {name: own[place] for name, own, place in zip(options, schemes, pairs.choose(budget), strict=True)}


def assign_schemes(
    layers: Sequence[Layer], schemes: Sequence[QuantScheme], budget: Budget, sensitivity: Sensitivity
) -> tuple[dict[str, QuantScheme], dict[str, str]]:
    """For ``layers`` without a reason to stay in float: the scheme of each layer that gets one, and a note on it.

    All others get a reason. Experts get ``QuantScheme.for_experts`` or none. Raises ``ValueError`` as
    ``choose_schemes`` does, if ``sensitivity`` is of another model or of other schemes, and if all layers stay in
    float.
    """
    if foreign := sorted({record.name for record in sensitivity.records} - {layer.name for layer in layers}):
        raise ValueError(
            f"sensitivity has {listed(foreign)}, but the model has no such layer: measure it on this model"
        )
    waiting = [layer for layer in layers if not layer.reason]
    own_schemes = ((layer, layer.scheme_for(scheme)) for layer in waiting for scheme in schemes)
    options = {(layer.name, scheme.name): scheme for layer, scheme in own_schemes}
    known = {record.scheme for record in sensitivity.records}
    if unknown := sorted({scheme for _, scheme in options} - known):
        raise ValueError(f"sensitivity wasn't measured under {listed(unknown)}: measure it, or leave it out")
    sensitivity = _narrowed(sensitivity, options)
    chosen = choose_schemes(sensitivity, budget)
    damages: dict[str, dict[str, float]] = defaultdict(dict)
    for record in sensitivity.records:
        damages[record.name][record.scheme] = record.damage
    notes = {}
    for layer in waiting:
        own, name = damages[layer.name], chosen.get(layer.name)
        if name is not None:
            notes[layer.name] = f"budget: {sensitivity.metric} {own[name]:.2g} alone"
        elif own:
            damage, scheme = min((damage, scheme) for scheme, damage in own.items())
            layer.reason = f"budget: {sensitivity.metric} {damage:.2g} alone under {scheme!r}"
        else:
            layer.reason = "budget: it saw no tokens, so nothing is known of it"
        layer.is_wish = bool(layer.reason)
    if not notes:
        way_out = "lower it" if budget.bytes is not None else "raise it, or allow schemes that lose less"
        raise ValueError(f"the budget leaves all layers in float, so there is nothing to quantize: {way_out}")
    return {layer: options[layer, name] for layer, name in chosen.items() if name is not None}, notes


def _narrowed(sensitivity: Sensitivity, options: Collection[tuple[str, str]]) -> Sensitivity:
    """The measurements of these layers under these schemes only; other layers count with their float bytes."""
    records = tuple(record for record in sensitivity.records if (record.name, record.scheme) in options)
    names = {record.name for record in records}
    dropped = {record.name: record.bytes_before for record in sensitivity.records if record.name not in names}
    return replace(sensitivity, other_bytes=sensitivity.other_bytes + sum(dropped.values()), records=records)


def added_damage(record: LayerSensitivity, metric: str) -> float:
    """A layer's damage in the unit in which damages are summed."""
    return record.damage if metric == KL else record.damage**2


class _Pairs:
    """The bytes and damage of choices for the first layers, by ascending bytes; every next pair has less damage."""

    def __init__(self, other_bytes: int) -> None:
        self._bytes = torch.tensor([other_bytes], device="cpu")
        self._damage = torch.zeros(1, dtype=torch.float64, device="cpu")
        # For each layer and each pair: the previous pair that it extends, and the layer's option.
        self._steps: list[tuple[Tensor, Tensor]] = []

    def extend(self, bytes: list[int], damages: list[float]) -> None:
        """Adds a layer with these options."""
        count = len(bytes)
        total = (self._bytes[:, None] + torch.tensor(bytes, device="cpu")).flatten()
        damage = (self._damage[:, None] + torch.tensor(damages, dtype=torch.float64, device="cpu")).flatten()
        order = torch.argsort(damage, stable=True)
        order = order[torch.argsort(total[order], stable=True)]
        total, damage = total[order], damage[order]
        least = damage.cummin(0).values
        better = torch.cat((damage[:1] < math.inf, damage[1:] < least[:-1]))
        total, damage, order = total[better], damage[better], order[better]
        if len(total) > _MOST_PAIRS:
            width = (total[-1] - total[0]) / _MOST_PAIRS
            place = ((total - total[0]) / width).floor()
            # The last pair of a range has the minimum damage; the very first pair must stay, or nothing might fit.
            kept = torch.cat((place[1:] != place[:-1], torch.ones(1, dtype=torch.bool, device="cpu")))
            kept[0] = True
            total, damage, order = total[kept], damage[kept], order[kept]
        self._bytes, self._damage = total, damage
        self._steps.append((order // count, order % count))

    def choose(self, budget: Budget) -> list[int]:
        """The option of each layer."""
        if budget.bytes is not None:
            assert not isinstance(budget.bytes, str)
            fitting = int((self._bytes <= budget.bytes).sum())
            if not fitting:
                least = int(self._bytes[0])
                raise ValueError(
                    f"the model takes at least {least:,} bytes ({size(least)}) with these schemes; the budget is "
                    f"{budget.bytes:,}: raise it, or allow smaller schemes"
                )
            pair = fitting - 1
        else:
            limit = budget.kl if budget.kl is not None else (budget.error or 0.0) ** 2
            pair = int((self._damage > limit).sum())
        chosen = []
        for origins, options in reversed(self._steps):
            chosen.append(int(options[pair]))
            pair = int(origins[pair])
        return chosen[::-1]
