"""Families of models in vLLM: each gives the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

import qgemm
from integrations.vllm_engine import model, tokens_of_transformers, tokens_of_vllm

pytestmark = pytest.mark.vllm
# Phi-3's files have merged layers; OLMo 2's model is transformers' own in some versions; GPT-2's layers are Conv1D.
FAMILIES = ("qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2")


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_models(family: str, tmp_path: Path) -> None:
    # Activations stay in float: with int8, what vLLM rounds otherwise can become another value, and then another token.
    made = qgemm.quantize_model(model(family), "int8-weight", progress=False)
    made.save_pretrained(tmp_path / family)
    expected = tokens_of_transformers(made)
    assert len({token for tokens in expected for token in tokens}) > 10
    assert tokens_of_vllm(tmp_path / family) == expected
