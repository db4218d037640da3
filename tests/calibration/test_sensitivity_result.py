"""A result of ``sensitivity`` as a table and as JSON."""

from __future__ import annotations

import json

import pytest

from qgemm.calibration import LayerSensitivity, Sensitivity


def example_result() -> Sensitivity:
    records = (
        LayerSensitivity("a", "int8", 0.25, 0.01, 4000, 1010),
        LayerSensitivity("a", "int8-static", 0.5, 0.02, 4000, 1014),
        LayerSensitivity("b", "int8", 0.3, 0.005, 2048, 512),
    )
    return Sensitivity("kl", 640, 5000, records)


def test_the_table_has_the_worst_first() -> None:
    result = example_result()
    assert [(record.name, record.scheme) for record in result.ranked()] == [
        ("a", "int8-static"),
        ("b", "int8"),
        ("a", "int8"),
    ]
    assert str(result).splitlines() == [
        "layer  scheme         kl  layer error   before    after",
        "-------------------------------------------------------",
        "a      int8-static   0.5       0.0200     4 kB  1.01 kB",
        "b      int8          0.3       0.0050  2.05 kB    512 B",
        "a      int8         0.25       0.0100     4 kB  1.01 kB",
        "-------------------------------------------------------",
        "kl: KL divergence of the logits, in nats, with this layer alone quantized; over 640 tokens",
    ]
    assert "<td>int8-static</td>" in result._repr_html_()


def test_it_goes_through_json() -> None:
    result = example_result()
    assert Sensitivity.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    values = result.to_dict()
    for broken, message in (
        ([], "a sensitivity must hold exactly"),
        ({**values, "metric": "speed"}, "metric of a sensitivity is 'speed'"),
        ({**values, "tokens": -1}, "tokens of a sensitivity is -1; it must be a number, 0 or more"),
        ({**values, "records": "all"}, "records of a sensitivity is 'all'; it must be a list"),
        ({**values, "records": [{"name": "a"}]}, "record 0 of a sensitivity must hold exactly"),
        ({**values, "records": [{**values["records"][0], "damage": float("nan")}]}, "damage of record 0 of a"),
    ):
        with pytest.raises(ValueError, match=message):
            Sensitivity.from_dict(broken)
