"""Names in one line."""

import pytest

from qgemm_cli.patterns import alike, collapse, natural_order, pattern_of, ranges


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["lm_head"], "lm_head"),
        (["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp"], "model.layers.{0..2}.mlp"),
        (["h.3.c_fc"], "h.3.c_fc"),
        (["a.0.b.7", "a.0.b.8", "a.1.b.7"], "a.{0..1}.b.{7..8}"),
        (["0", "2"], "{0,2}"),
        (["w2v.conv1"], "w2v.conv1"),  # digits inside of a word are no position
        (["a.{}.b{0}"], "a.().b(0)"),
    ],
)
def test_collapse(names: list[str], shown: str) -> None:
    assert len({pattern_of(name) for name in names}) == 1
    assert collapse(names) == shown


def test_alike() -> None:
    assert alike(["a.0", "b", "a.1"], pattern_of) == [["a.0", "a.1"], ["b"]]


def test_ranges() -> None:
    assert ranges([5]) == "5"
    assert ranges([3, 1, 2, 7, 9, 10]) == "{1..3,7,9..10}"


def test_numbers_that_are_no_position_stay_text() -> None:
    # Python refuses to read over 4,300 digits.
    name = "a." + "9" * 5000
    assert collapse([name]) == name
    assert sorted([f"{name}.b", "a.10", "a.9"], key=natural_order) == ["a.9", "a.10", f"{name}.b"]
