"""Every example runs as a reader would run it: as a script, in a process of its own."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
from processes import run_process

ROOT = Path(__file__).parent.parent

# Arguments that keep a run short, and a pattern for a line that shows the example did its job.
EXAMPLES: dict[str, tuple[list[str], str]] = {
    "custom_kernel.py": ([], r"gemm_residual +largest error against float64: \d\.\de-0[789]"),
    "load_prequantized.py": ([], r"same output from both: True"),
    "quant_linear.py": ([], r"relative error of the output: 0\.00\d+"),
    "quantize_llama.py": ([], r"int8: [\d ]+"),
    "quantize_minilm.py": (["--rounds", "1"], r"minimum cosine similarity +0\.99[5-9]"),
    "sentence_embeddings.py": (["--rounds", "1"], r"minimum cosine .* 0\.99[5-9]\d, .*\n.* the same bits: yes"),
    "serve.py": ([], r"-> (w\d+ ?){6}\nthe tokens of generate: yes"),
    "serve_vllm.py": ([], r"-> \[(\d+(, )?){6}\]\nthe tokens of transformers: yes"),
}
# Packages that `make setup` doesn't install; without them an example says so in a sentence.
NEEDS = {
    "sentence_embeddings.py": ["sentence_transformers"],
    "serve.py": ["fastapi", "uvicorn", "openai"],
    "serve_vllm.py": ["vllm", "openai"],
}


def test_every_example_is_run() -> None:
    assert set(EXAMPLES) == {path.name for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, pattern = EXAMPLES[name]
    # Without the interpreter that conftest.py asks for: an example that needs it must say so itself. Nothing may be
    # fetched from a hub.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
        "HF_HUB_OFFLINE": "1"
    }
    monkeypatch.chdir(tmp_path)
    script = ROOT / "examples" / name
    transformers = "from transformers import" in script.read_text(encoding="utf-8")
    result = run_process(script, *arguments, environment=environment, transformers=transformers)
    if missing := [each for each in NEEDS.get(name, []) if importlib.util.find_spec(each) is None]:
        assert (result.returncode, result.stdout) == (1, "")
        assert re.fullmatch(rf"This example needs {missing[0]}, .* isn't installed: pip install .*\n", result.stderr)
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr
    assert re.search(pattern, result.stdout, re.MULTILINE), result.stdout
