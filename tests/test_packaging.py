"""What pip is told: by the package's metadata, and by what qgemm prints and its documents say."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

import qgemm

ROOT = Path(__file__).parent.parent
# The name qgemm on the package index is somebody else's, and qgemm-torch isn't there.
OURS = re.compile(r"""pip install\b[^\n`#]*["'\s]qgemm([-_]torch)?(?=[\["'\s\\=<>~`]|$)(?!\S* @ )""")
NAMED = re.compile(r'pip install ((?:"[\w.-]+[<>=!~][^"]*" ?)+)')


@pytest.fixture(scope="session")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """The metadata of the wheel, as setuptools makes it."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "qgemm").mkdir()
    (folder / "out").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "qgemm/version.py", "qgemm/__init__.py"):
        shutil.copy(ROOT / name, folder / name)
    code = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('out'))"
    made = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return email.message_from_string((folder / "out" / made.stdout.split()[-1] / "METADATA").read_text("utf-8"))


def texts() -> dict[str, str]:
    """Every file of the project that may hold a line for pip."""
    folders = ("qgemm", "qgemm_cli", "benchmarks", "examples", "docs", "tests")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    found += [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in found if path != Path(__file__)}


def test_the_metadata_is_that_of_qgemm_torch(metadata: Message) -> None:
    assert metadata["Name"] == "qgemm-torch"
    assert metadata["Version"] == qgemm.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["License-Expression"] == "MIT"
    readme = metadata.get_payload()
    assert isinstance(readme, str)
    assert readme.strip() == (ROOT / "README.md").read_text("utf-8").strip()
    # What an extra of this package wants of another one is for this package.
    wanted = [line for line in metadata.get_all("Requires-Dist", []) if line.startswith("qgemm")]
    assert wanted
    assert all(line.startswith("qgemm-torch[") for line in wanted)


def test_no_line_for_pip_fetches_a_package_of_that_name() -> None:
    assert OURS.search('pip install "qgemm[cli]"')
    assert OURS.search("pip install qgemm-torch")
    assert not OURS.search('pip install "qgemm-torch[cli] @ git+https://some.where/it"')
    assert not OURS.search("pip install dist/qgemm_torch-0.1.0-py3-none-any.whl")
    places = [f"{name}: {match[0]}" for name, text in texts().items() for match in OURS.finditer(text)]
    assert places == []


def test_packages_that_are_named_are_those_of_the_extras(metadata: Message) -> None:
    wanted = {line.split(";")[0].strip() for line in metadata.get_all("Requires-Dist", [])}
    named = {
        (name, package)
        for name, text in texts().items()
        if name.startswith("qgemm")
        for match in NAMED.finditer(text)
        for package in re.findall(r'"([^"]+)"', match[1])
    }
    assert {package for _, package in named} >= {"transformers>=5.17", "typer>=0.15", "pyyaml>=5.1", "peft>=0.20"}
    assert {place for place in named if place[1] not in wanted} == set()
