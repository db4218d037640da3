"""Recipes as values: printed, to dictionaries and YAML and back; and what is refused of files from anyone."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import qgemm
from qgemm.calibration import (
    AWQ,
    GPTQ,
    METHODS,
    BiasCorrection,
    Block,
    HadamardRotation,
    Method,
    MSEWeights,
    OutlierColumns,
    Recipe,
    ResidualRotation,
    SmoothQuant,
)

RECIPES = [
    Recipe(),
    Recipe([method() for method in METHODS.values() if method is not MSEWeights]),
    Recipe((SmoothQuant(alpha=0.25), HadamardRotation(values=False), GPTQ(damping=1e-3, act_order=False))),
    Recipe([MSEWeights(by_input=True)]),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_round_trips(recipe: Recipe, tmp_path: Path) -> None:
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    recipe.save(tmp_path / "recipe.yaml")
    assert Recipe.load(tmp_path / "recipe.yaml") == recipe


def test_every_method_has_a_name_and_plain_settings_with_defaults() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert method.from_dict({}) == method()
        assert method.from_dict(method().to_dict()) == method()
        for each in fields(method):  # type: ignore[arg-type]
            assert isinstance(each.default, bool | int | float | str | None), f"{each.name} of {name}"


def test_printed() -> None:
    text = str(Recipe([SmoothQuant(alpha=0.5), MSEWeights()]))
    assert text == "1. smoothquant(alpha=0.5, through_linear=True)\n2. mse-weights(by_input=False)"
    assert str(Recipe()) == "nothing but rounding to nearest"
    assert [method.name for method in RECIPES[2]] == ["smoothquant", "hadamard", "gptq"]
    assert len(RECIPES[2]) == 3
    assert RECIPES[2].needs_data
    assert not Recipe([MSEWeights()]).needs_data


def test_yaml_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("# ours\nmethods:\n- smoothquant: {alpha: 1}\n- gptq\n- bias-correction:\n")
    recipe = Recipe.load(path)
    assert recipe == Recipe([SmoothQuant(alpha=1.0), GPTQ(), BiasCorrection()])
    path.write_text(json.dumps(recipe.to_dict()))
    assert Recipe.load(path) == recipe


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    recipe = Recipe([GPTQ(damping=1e-5)])
    recipe.save(path)
    assert json.loads(path.read_text()) == recipe.to_dict()
    assert Recipe.load(path) == recipe  # 1e-05 is a word in YAML
    path.write_text('{"methods": [{"gptq": {"damping": 1, "damping": 2}}]}')
    with pytest.raises(ValueError, match="not valid JSON for a recipe: 'damping' appears twice"):
        Recipe.load(path)


@dataclass(frozen=True)
class Mine(Method):
    name: ClassVar[str] = "mine"
    size: int = 1

    def apply(self, block: Block) -> None: ...


def test_methods_of_ones_own() -> None:
    recipe = Recipe([Mine(3)])
    assert Recipe.from_dict(recipe.to_dict(), [Mine]) == recipe
    with pytest.raises(ValueError, match="there is no method 'mine'"):
        Recipe.from_dict(recipe.to_dict())


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (GPTQ(), r"recipe is GPTQ\(.*\); it must be a list of methods"),
        ("gptq", "it must be a list of methods"),
        ([GPTQ], r"recipe holds the class GPTQ; create an instance: GPTQ\(\)"),
        (["gptq"], "recipe holds 'gptq'; it takes methods"),
    ],
)
def test_what_is_no_method_is_refused(methods: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Recipe(methods)


@pytest.mark.parametrize(
    ("later", "earlier"),
    [
        (AWQ(), GPTQ()),
        (SmoothQuant(), GPTQ()),
        (HadamardRotation(), GPTQ()),
        (OutlierColumns(), GPTQ()),
        (AWQ(), MSEWeights()),
        (SmoothQuant(), MSEWeights(by_input=True)),
        (OutlierColumns(), AWQ()),
        (GPTQ(), BiasCorrection()),
        (SmoothQuant(), BiasCorrection()),
    ],
)
def test_an_order_that_loses_work_is_refused(later: Method, earlier: Method) -> None:
    Recipe([later, earlier])
    message = f"{later.name} after {earlier.name}, .* Put {later.name} first: {later.name}, {earlier.name}$"
    with pytest.raises(ValueError, match=message):
        Recipe([earlier, later])
    with pytest.raises(ValueError, match=message):
        Recipe([earlier, Mine(), ResidualRotation(), later])
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict({"methods": [{each.name: each.to_dict()} for each in (earlier, later)]})


@pytest.mark.parametrize(("earlier", "later"), [(GPTQ(), MSEWeights()), (MSEWeights(), GPTQ())])
def test_of_two_methods_that_decide_weights_one_is_lost(earlier: Method, later: Method) -> None:
    with pytest.raises(ValueError, match=f"Leave one of {earlier.name} and {later.name} out"):
        Recipe([earlier, later])
    Recipe([AWQ(), later])  # its scales are kept


@pytest.mark.parametrize("method", [kind() for kind in METHODS.values() if kind is not ResidualRotation])
def test_a_method_twice_is_refused(method: Method) -> None:
    with pytest.raises(ValueError, match=f"recipe has {method.name} twice: give it once"):
        Recipe([method, Mine(), method])
    Recipe([Mine(1), Mine(2)])  # it names nothing that it settles


def test_a_wrong_order_is_found_before_any_work() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match="smoothquant after gptq"):
        qgemm.quantize_model(model, calibration=[torch.randn(4, 8)], recipe=[GPTQ(), SmoothQuant()])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a recipe is an object with one list, 'methods'; this is None"),
        ("- gptq", "a recipe is an object"),
        ("methods: gptq", "a recipe is an object"),
        ("methods: []\nmore: 1", "a recipe is an object"),
        ("methods: [gtpq]", r"there is no method 'gtpq'; did you mean 'gptq'\?"),
        ("methods: [7]", "methods holds 7; each is a name"),
        ("methods: [[gptq]]", "methods holds"),
        ("methods: [{gptq: {}, awq: {}}]", "methods holds"),
        ("methods: [{gptq: 3}]", "the settings of gptq are 3"),
        ("methods: [smoothquant: {alfa: 1}]", r"smoothquant has no setting 'alfa'; did you mean 'alpha'\?"),
        ("methods: [smoothquant: {alpha: 2}]", "alpha is 2.0; it must be 0 to 1"),
        ("methods: [smoothquant: {alpha: .nan}]", "alpha of smoothquant is nan; it must be a number or 'search'"),
        ("methods: [smoothquant: {alpha: 2026-01-01}]", "alpha of smoothquant is datetime"),
        ("methods: [gptq: {damping: 1, damping: 2}]", "'damping' appears twice"),
        ("methods: [gptq: {<<: {damping: 1, block_size: 7}, damping: 2}]", "not valid YAML for a recipe"),
        ("methods: [&a gptq, *a]", "no anchors and aliases"),
        ("methods: [!!python/object/apply:os.system [ls]]", "not valid YAML for a recipe"),
        ("methods: [gptq", "not valid YAML for a recipe"),
        ("\x00", "not valid YAML for a recipe"),
        ("methods: [gptq: {damping: " + "9" * 5000 + "}]", "damping|not valid YAML"),
        ("methods: [gptq: {damping: 0x" + "f" * 5000 + "}]", "damping|not valid YAML|Exceeds"),
        ("[" * 20_000, "not valid YAML for a recipe"),
        ("methods: [" + "gptq, " * 101 + "]", "methods lists 101 methods"),
        (" " * 100_001, "it has more than 100000 bytes"),
    ],
)
def test_files_that_are_no_recipe_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Recipe.load(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 1000


def test_broken_files_neither_crash_nor_hang(tmp_path: Path) -> None:
    generator = random.Random(0)
    path = tmp_path / "recipe.yaml"
    RECIPES[2].save(path)
    whole = path.read_bytes()
    began = time.monotonic()
    read = 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            place = generator.randrange(len(content))
            piece = generator.choice(
                [b"", b"&a ", b"*a", b"[", b"{", b"- ", b"\n", b"!!", b": ", bytes([generator.randrange(256)])]
            )
            content[place : place + generator.randint(0, 3)] = piece
        path.write_bytes(content)
        try:
            Recipe.load(path)
            read += 1
        except ValueError:
            pass
    assert 0 < read < 300
    assert time.monotonic() - began < 30


def test_without_pyyaml_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r'pip install "pyyaml>=5\.1"'):
        Recipe().save(tmp_path / "recipe.yaml")
