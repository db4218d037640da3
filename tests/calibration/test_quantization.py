"""Quantization: what arguments say, as a value that goes through JSON."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qgemm
from qgemm.calibration import GPTQ, BiasCorrection, Method, Percentile, Recipe, SmoothQuant
from qgemm.calibration.quantization import Quantization


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"scheme": "int4", "skip": "a", "include": ["b.*", re.compile("c")]},
        {"scheme": {"z.*": "int4", re.compile("^b"): None, "*": "int8"}},
        {"scheme": {"*": None}},
        {"scheme": "int8-static", "input_scales": {"0": 0.5, "1": torch.tensor(0.25)}},
        {"scheme": "int8-static-asymmetric", "input_scales": {"0": (0.5, 3)}},
        {
            "recipe": [SmoothQuant(alpha=0.7), GPTQ()],
            "observer": Percentile(99.0),
            "resume_folder": "a",
            "device": "cpu",
        },
        {"scheme": ["int8", "int4"], "budget": qgemm.Budget(bytes="2GB")},
        {"scheme": "int4", "budget": qgemm.Budget(kl=0.5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("file", ["wanted.json", "wanted.yaml"])
def test_what_went_through_a_file_says_the_same(arguments: dict[str, Any], file: str, tmp_path: Path) -> None:
    wanted = Quantization.of(**arguments)
    wanted.save(tmp_path / file)
    again = Quantization.load(tmp_path / file)
    assert again.to_dict() == wanted.to_dict() == json.loads(json.dumps(wanted.to_dict()))
    for each in ("options", "skip", "include", "recipe", "budget", "device"):
        assert getattr(again, each) == getattr(wanted, each)
    assert list(again.schemes.items()) == list(wanted.schemes.items())
    assert repr(again.observer) == repr(wanted.observer)


def test_a_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "wanted.yaml"
    path.write_text("scheme: int8-static\nskip: lm_head\nrecipe: [gptq, bias-correction]\nobserver: mse\n")
    expected = Quantization.of("int8-static", skip="lm_head", recipe=[GPTQ(), BiasCorrection()], observer="mse")
    assert Quantization.load(path).to_dict() == expected.to_dict()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a quantization is an object of names and values; this is None"),
        ("- int8", "a quantization is an object"),
        ("scheme: int9", "'int9'"),
        ("shceme: int8", r"there is no setting 'shceme'; did you mean 'scheme'\?"),
        ("recipe: [gtpq]", r"there is no method 'gtpq'"),
        ("observer: 7", "observer is 7"),
        ("budget: {byte: 7}", "byte"),
        ("input_scales: 7", "input_scales"),
        ("skip: !!python/object/apply:os.system [ls]", "not valid YAML for a quantization"),
        ("skip: &a [b]\ninclude: *a", "no anchors and aliases"),
        (" " * 1_000_001, "it has more than 1000000 bytes"),
    ],
)
def test_files_that_are_no_quantization_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wanted.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Quantization.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_of_many_names_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "wanted.json"
    path.write_text(json.dumps(dict.fromkeys(map(str, range(70_000)), 0)))
    began = time.monotonic()
    with pytest.raises(ValueError, match="there is no setting '0'"):
        Quantization.load(path)
    assert time.monotonic() - began < 20  # comparing each with each took 90 seconds


def test_a_regular_expression_keeps_its_flags() -> None:
    values = Quantization.of(skip=re.compile("^B", re.IGNORECASE | re.MULTILINE)).to_dict()
    assert values["skip"] == ["re:(?im)^B"]
    (again,) = Quantization.from_dict(values).skip
    assert isinstance(again, re.Pattern)
    assert again.search("a\nb")
    assert Quantization.of(skip=again).to_dict() == values


def test_what_few_have_is_only_there_if_it_is_given() -> None:
    assert Quantization.of(recipe=[GPTQ()]).to_dict() == {
        "scheme": "int8",
        "skip": [],
        "include": [],
        "input_scales": None,
        "recipe": Recipe([GPTQ()]).to_dict(),
    }


@pytest.mark.parametrize(
    "values",
    [
        {"scheme": "int9"},
        {"scheme": ["int8", "int4"]},
        {"recipe": {"methods": ["gtpq"]}},
        {"observer": {"percentile": {"of": 3}}},
        {"observer": {"median": {}}},
        {"budget": {"bytes": 1, "kl": 1}},
        {"colour": "green"},
    ],
    ids=str,
)
def test_what_it_is_not_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Quantization.from_dict(values)


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("recipe", [None, []], ids=["at once", "block by block"])
def test_warnings_name_the_line_that_called(recipe: list[Method] | None) -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model.forward = lambda x: model["a"](x)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="'b' saw no tokens of calibration") as caught:
        qgemm.quantize_model(model, "int8-static", calibration=[torch.randn(4, 64)], recipe=recipe)
    assert {warning.filename for warning in caught} == {__file__}
