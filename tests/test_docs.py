"""The Python code in the documents runs: a file's blocks, in order, as one script in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
    assert {"README.md", "docs/guide.md", "docs/stages.md"} <= set(DOCUMENTS)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_of(document: str, tmp_path: Path) -> None:
    code = python_blocks((ROOT / document).read_text(encoding="utf-8"))
    # A file, since Triton reads the source of its kernels from there.
    script = tmp_path / f"{Path(document).stem}.py"
    script.write_text(code, encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"{document}: {result.stderr}"
