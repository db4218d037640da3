"""Tests lie where the package has what they test: ``tests/kernels/test_gemm.py`` tests ``qgemm/kernels/gemm/``.

What follows that name says which part of it a file tests, where one file would be too long: ``test_gemm_config.py``.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
# What tests the whole, or the repository, or what tests themselves read, and not one file or folder of the package.
EXCEPTIONS = {
    "calibration/test_accuracy.py",
    "checkpoint/test_crashes.py",
    "checkpoint/test_fuzz.py",
    "checkpoint/test_samples.py",
    "cli/test_broken_checkpoints.py",
    "cli/test_documents.py",
    "cli/test_gguf.py",
    "cli/test_schemes.py",
    "kernels/stages/test_seed_kernels.py",
    "kernels/test_compile.py",
    "kernels/test_machine_code.py",
    "test_fuzz_states.py",
    "test_imports.py",
    "test_layout.py",
    "test_packaging.py",
    "test_schemes.py",
}


def subject(path: Path) -> Path | None:
    """The file or folder that a test file says it tests, the one with the longest name."""
    folder = path.relative_to(ROOT / "tests").parent
    words = path.stem.removeprefix("test_").split("_")
    if folder.name == "cli":
        folders = [ROOT / "qgemm_cli", ROOT / "qgemm_cli" / "commands"]
    else:
        folders = [ROOT / "qgemm" / folder, *([ROOT] if folder == Path() else [])]
    for count in range(len(words), 0, -1):
        for found in (each / "_".join(words[:count]) for each in folders):
            if found.is_dir() or found.with_suffix(".py").exists():
                return found
    return None


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_a_test_has_the_name_of_what_it_tests(path: Path) -> None:
    name = path.relative_to(ROOT / "tests").as_posix()
    assert (subject(path) is None) == (name in EXCEPTIONS), f"tests/{name} tests {subject(path)}"


def test_exceptions_are_there() -> None:
    assert {ROOT / "tests" / name for name in EXCEPTIONS} <= set(TESTS)
