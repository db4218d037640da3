"""Runs the command in this process, and makes the folders that it is run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner, Result

from qgemm_cli.app import app


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments: object, exit_code: int = 0) -> Result:
    result = invoke(*arguments)
    assert result.exit_code == exit_code, result.output
    return result


def run_json(*arguments: object, exit_code: int = 0) -> dict[str, Any]:
    document = json.loads(run(*arguments, "--json", exit_code=exit_code).stdout)
    assert isinstance(document, dict)
    return document


def run_failing(*arguments: object) -> str:
    """The one sentence of a command that can't do what it is asked."""
    result = run(*arguments, exit_code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("qgemm: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if quantization is not None:
        config["quantization_config"] = quantization  # type: ignore[assignment]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype)
