"""Many names in one, and back."""

from __future__ import annotations

import pytest

from qgemm.checkpoint.name_ranges import MAX_NAMES, collapse, expand

CASES = {
    "blocks": ([f"h.{i}.up" for i in range(80)], ["h.[0-79].up"]),
    "two kinds in turns": (["h.0.a", "h.0.b", "h.1.a", "h.1.b"], ["h.[0-1].a", "h.[0-1].b"]),
    "a gap": (["h.0.up", "h.1.up", "h.3.up", "h.7.up"], ["h.[0-1,3,7].up"]),
    "out of order": (["h.10.up", "h.9.up"], ["h.[9-10].up"]),
    "experts of every block": ([f"h.{i}.e.{j}.w" for i in range(3) for j in range(8)], ["h.[0-2].e.[0-7].w"]),
    "another number of experts": (["h.0.e.0", "h.0.e.1", "h.1.e.0"], ["h.0.e.[0-1]", "h.1.e.0"]),
    "one": (["head"], ["head"]),
    "one with a number": (["h.3.up"], ["h.3.up"]),
    "none": ([], []),
    "the model itself": ([""], [""]),
    "numbers alone": (["0", "2"], ["[0,2]"]),
    "a number that begins with 0": (["h.01.up", "h.1.up", "h.2.up"], ["h.01.up", "h.[1-2].up"]),
    "a number inside of a part": (["h1.up", "h2.up"], ["h1.up", "h2.up"]),
    # The keys of a ModuleDict may be anything without a dot.
    "brackets of one's own": (["h.[0-1].up", "h.[", "h.[[2"], ["h.[[0-1].up", "h.[[", "h.[[[2"]),
    "digits that aren't ASCII": (["h.٣.up", "h.4.up"], ["h.٣.up", "h.4.up"]),
    "a very large number": (["h.123456789012.up"], ["h.123456789012.up"]),
    "of other lengths": (["h.0", "h.0.up", "h.1", "h.1.up"], ["h.[0-1]", "h.[0-1].up"]),
}


@pytest.mark.parametrize("case", CASES)
def test_names_and_lines(case: str) -> None:
    names, lines = CASES[case]
    assert collapse(names) == lines
    assert sorted(expand(lines)) == sorted(names)


@pytest.mark.parametrize("line", ["h.[a].up", "h.[].up", "h.[1-0].up", "h.[1,].up", "h.[1-2-3]", "h.[-1]", "h.[0"])
def test_brackets_that_are_none(line: str) -> None:
    with pytest.raises(ValueError, match="isn't a list of ranges"):
        expand([line])


def test_no_line_stands_for_names_without_end() -> None:
    assert len(expand([f"h.[0-{MAX_NAMES - 1}]"])) == MAX_NAMES
    for lines in (["h.[0-999999999]"], [f"h.[0-{MAX_NAMES}]"], ["[0-999].[0-999].[0-999].[0-999]"]):
        with pytest.raises(ValueError, match=r"over 500000 names|very long"):
            expand(lines)
    with pytest.raises(ValueError, match="over 500000 names"):
        expand([f"h.[0-{MAX_NAMES - 1}]", "one more"])
