"""The Python code in the documents runs: a file's blocks, in order, as one script in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_code_of_documents(tmp_path: Path) -> None:
    scripts = []
    for document in DOCUMENTS:
        folder = tmp_path / document.replace("/", "-")
        folder.mkdir()
        # A file, since Triton reads the source of its kernels from there.
        scripts.append(folder / "code.py")
        scripts[-1].write_text(python_blocks((ROOT / document).read_text(encoding="utf-8")), encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    run = Path(__file__).with_name("run_scripts.py")
    result = subprocess.run(
        [sys.executable, run, *scripts], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    failed = json.loads(result.stdout)
    assert not failed, "\n".join(f"{DOCUMENTS[index]}: {error}" for index, error in failed)
