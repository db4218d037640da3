"""Broken checkpoints by the hundred, the ones of ``tests/checkpoint/fuzz.py``: inspect and compare end in order."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint.fuzz import Watch, make_every_foreign, write_files
from checkpoint.fuzz_breaks import make_case
from checkpoint.fuzz_models import Good, make_good

from cli.command import Result, invoke

CASES, COMPLETE_CASES = 60, 600
"""The latter with ``--complete``. Of qgemm's own, 6,000 have been run."""


def check(result: Result) -> None:
    """An answer, or one sentence of what is wrong; nothing that a terminal acts on."""
    assert result.exit_code in (0, 1, 2), result.exception
    if result.exit_code == 2:
        assert result.stdout == ""
        assert result.stderr.splitlines()[-1].startswith("qgemm: ")
        assert "(--debug shows where)" not in result.stderr, result.stderr
    else:
        json.loads(result.stdout)
    assert "\x1b" not in result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_good, make_every_foreign])
def test_inspect_and_compare(make: Callable[[Path], list[Good]], tmp_path: Path, pytestconfig: pytest.Config) -> None:
    cases = COMPLETE_CASES if pytestconfig.getoption("--complete") else CASES
    (tmp_path / "good").mkdir()
    good = make(tmp_path / "good")
    write_files(good[0].files, tmp_path / "outside", tmp_path)
    watch = Watch()
    codes: Counter[int] = Counter()
    for number in range(cases):
        case = make_case(good, 1, number)
        folder = tmp_path / "case"
        write_files(case.files, folder, tmp_path / "outside")
        watch.start()
        try:
            inspected = invoke("inspect", folder, "--json")
            strangers = watch.outside_of(folder)
            watch.opened = None
            check(inspected)
            assert not strangers, f"opened {strangers}"
            check(invoke("compare", folder, folder, "--json"))
        except BaseException:
            pytest.fail(f"case {number}: {case.breaks}\n{inspected.output}")
        codes[inspected.exit_code] += 1
        shutil.rmtree(folder)
    assert min(codes[code] for code in (0, 1, 2)) > cases / 20, codes
