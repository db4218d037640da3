"""The Python code in the documents runs: a file's blocks, in order, as one script in a process of its own.

And the site builds without a warning or a dead link, with every public name on a page of the API reference.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_process

ROOT = Path(__file__).parent.parent
OF_TRANSFORMERS = ["KeyValueCache", "QGemmConfig"]  # which qgemm imports for those who ask for them
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if "```python" in path.read_text(encoding="utf-8")
)


def python_blocks(text: str) -> str:
    """The blocks of a document, each line at its own line number, so that a traceback points into the document."""
    lines = text.splitlines()
    code = [""] * len(lines)
    inside = False
    for number, line in enumerate(lines):
        if re.match(r"\s*```", line):
            inside = line.strip() == "```python"
        elif inside:
            code[number] = line
    return "\n".join(code)


def test_documents_are_found() -> None:
    assert {"README.md", "docs/guide/quantize.md", "docs/stages.md", "docs/tutorial.md"} <= set(DOCUMENTS)


@pytest.mark.slow(quick=["README.md"])
@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_of_a_document(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file, since Triton reads the source of its kernels from there.
    script = tmp_path / "code.py"
    code = python_blocks((ROOT / document).read_text(encoding="utf-8"))
    script.write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    result = run_process(script, environment=environment, transformers="from transformers import" in code)
    assert result.returncode == 0, result.stderr
    if document == "docs/tutorial.md":
        # It shows what its code prints, in order. Figures, and names with them, differ among machines.
        shown = re.findall(r"```text\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)
        assert len(shown) > 5
        assert words(" ".join(shown)) == words(result.stdout)


def test_pages_are_short() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("docs/**/*.md")}
    assert len(lines) > 30
    assert not {name: number for name, number in lines.items() if number > 400}


def sections(page: Path) -> set[str]:
    """The anchors of a page: those that GitHub makes of its headings, and those that it names itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    headings = [re.sub(r"[^\w -]", "", re.sub(r"\]\(.*?\)", "", heading)) for heading in headings]
    return {*(heading.lower().replace(" ", "-") for heading in headings), *re.findall(r'<a id="([^"]+)"', text)}


def test_links_lead_to_pages_and_their_sections() -> None:
    """Those between documents, and the pages that sources name."""
    links = []
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        found = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8"))
        links += [(path, (path.parent / page if page else path).resolve(), anchor) for page, anchor in found]
    for folder in ("benchmarks", "examples", "qgemm", "qgemm_cli", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            found = re.findall(r"(docs/[\w/]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8"))
            links += [(path, ROOT / page, anchor) for page, anchor in found]
    assert len(links) > 300
    assert not {(str(path), str(page)) for path, page, _ in links if not page.exists()}
    links = [link for link in links if link[2] and link[1].suffix == ".md" and link[1].parent.name != "api"]
    anchors = {page: sections(page) for _, page, _ in links}
    assert not {(str(path), page.name, anchor) for path, page, anchor in links if anchor not in anchors[page]}


def words(text: str) -> str:
    return " ".join("0" if re.search(r"\d", word) else word for word in text.split())


@pytest.mark.slow
def test_site_builds_and_has_every_public_name(tmp_path: Path) -> None:
    """``mkdocs build --strict`` fails on a warning: a dead link or anchor, a name that isn't there, a page left out."""
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # Where two modules have the same object, one page has it and the other one links to it.
    missing = []
    for module in ("qgemm", "qgemm.nn", "qgemm.calibration", "qgemm.kernels", "qgemm.kernels.stages"):
        page = (tmp_path / "api" / module.rpartition(".")[2] / "index.html").read_text(encoding="utf-8")
        names = [*importlib.import_module(module).__all__, *(OF_TRANSFORMERS if module == "qgemm" else [])]
        assert len(names) > 5
        ids = {*re.findall(r'id="([^"]+)"', page), *re.findall(r'href="\.\./qgemm/#([^"]+)"', page)}
        missing += [f"{module}.{name}" for name in names if not ids & {f"{module}.{name}", f"qgemm.{name}"}]
    assert not missing


def test_the_architecture_names_every_part() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    parts = [path for folder in ("qgemm", "qgemm/kernels") for path in (ROOT / folder).iterdir() if path.name[0] != "_"]
    names = [f"{path.name}/" if path.is_dir() else path.name for path in parts if path.suffix in ("", ".py")]
    assert len(names) > 20
    assert not [name for name in names if f"`{name}`" not in text]


def test_the_readme_counts_the_families_that_it_names() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    counted = re.findall(r"tested on (\d+) families[^:]*: (.*) \|", text)
    assert len(counted) == 2
    for number, names in counted:
        assert int(number) == len(re.findall(", | and ", names)) + 1  # "Qwen2 and 3" are two
