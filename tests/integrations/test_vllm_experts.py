"""Mixtures of experts in vLLM, in every scheme that experts have: the tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

import qgemm
from integrations.vllm_engine import mixture, tokens_of_transformers, tokens_of_vllm

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("qwen3", "int8"),
        ("mixtral", "int8"),
        ("qwen3", "fp8"),
        ("qwen3", "fp8-block"),
        ("qwen3", "int8-weight"),
        ("qwen3", "int4"),
        ("mixtral", "int4-32-asymmetric"),
        ("qwen3", "mxfp4"),
        ("qwen3", "nvfp4"),  # whose experts have a global scale each
    ],
)
def test_a_mixture_of_experts(family: str, scheme: str, tmp_path: Path) -> None:
    made = qgemm.quantize_model(mixture(family), scheme, progress=False)
    assert {name for name, module in made.named_modules() if isinstance(module, qgemm.QuantExperts)}
    made.save_pretrained(tmp_path / "mixture")
    assert tokens_of_vllm(tmp_path / "mixture") == tokens_of_transformers(made)


def test_experts_cut_by_column(tmp_path: Path) -> None:
    # Of 128 values between an expert's products, each of two ranks has 64, whose codes are packed anew.
    made = qgemm.quantize_model(mixture(), "int4-32", progress=False)
    made.save_pretrained(tmp_path / "mixture")
    assert tokens_of_vllm(tmp_path / "mixture", tensor_parallel_size=2) == tokens_of_transformers(made)


def test_experts_that_ranks_cannot_cut_are_refused_by_name(tmp_path: Path) -> None:
    qgemm.quantize_model(mixture(), "int4", skip="*.self_attn", progress=False).save_pretrained(tmp_path / "mixture")
    with pytest.raises(Exception, match=r"Engine core initialization failed|can't compute the experts"):
        tokens_of_vllm(tmp_path / "mixture", tensor_parallel_size=2)
