"""Runs scripts, each in its own folder and in a process of its own, forked from one that has imported PyTorch.

``python run_scripts.py SCRIPT ...`` prints as JSON ``[index, what went to stderr]`` of every script that failed.
Importing PyTorch and transformers takes seconds, once for all; qgemm is left to the scripts.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch  # noqa: F401
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: F401


def run(script: Path) -> str | None:
    """What ``script`` wrote to stderr if it failed; None if it didn't."""
    errors = script.with_suffix(".stderr")
    child = os.fork()
    if child == 0:
        os.chdir(script.parent)
        for descriptor, file in ((1, script.with_suffix(".stdout")), (2, errors)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
        sys.argv = [str(script)]
        code = 1
        try:
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return errors.read_text(encoding="utf-8") or "it failed" if status else None


if __name__ == "__main__":
    failures = [(index, run(Path(script))) for index, script in enumerate(sys.argv[1:])]
    print(json.dumps([(index, error) for index, error in failures if error is not None]))
