"""Estimates for models on several GPUs: sizes are those of real models, times those that were measured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import qgemm
from benchmarks import scaling
from benchmarks.models.shapes import ModelShape
from benchmarks.scaling import FLOAT, H200, SHAPES, Inventory, inventory

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY = ModelShape("tiny", "LlamaConfig", 3, {**SMALL, "vocab_size": 211})
MIXTURE = ModelShape(
    "tiny-mixture",
    "DeepseekV3Config",
    4,
    {
        **{**SMALL, "num_key_value_heads": 4, "vocab_size": 211, "moe_intermediate_size": 256, "n_routed_experts": 8},
        **{"first_k_dense_replace": 2, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 256},
    },
)


@functools.cache
def of(name: str, scheme: str = "int8", layers: int | None = None) -> Inventory:
    return inventory(SHAPES[name], scheme, layers)


@functools.cache
def a_tenth_of_70b() -> Inventory:
    # As measured: 8 of 80 layers, and a tenth of the vocabulary.
    found = inventory(SHAPES["llama-3-70b"], layers=8)
    return replace(found, head=found.head // 10, rest=found.rest // 10)


@pytest.mark.slow(quick=["tiny-int8"])
@pytest.mark.parametrize("scheme", ["int8", "int4", FLOAT])
@pytest.mark.parametrize("shape", [TINY, MIXTURE], ids=lambda shape: shape.name)
def test_sizes_are_those_of_the_model(shape: ModelShape, scheme: str) -> None:
    from transformers import AutoModelForCausalLM

    # Not cast afterwards: transformers 5.24 keeps DeepSeek's routers in float32.
    model: Any = AutoModelForCausalLM.from_config(shape.make_config(), dtype=torch.bfloat16)
    if scheme != FLOAT:
        qgemm.quantize_model(model, scheme)
    found = inventory(shape, scheme)
    assert found.weights() == sum(parameter.nbytes for parameter in model.parameters())
    assert found.layers == shape.layers
    assert found.mixtures == (2 if shape is MIXTURE else 0)
    # What the mixture keeps whole: all of its attention, since the plan of transformers doesn't cut it.
    assert bool(found.whole) == (shape is MIXTURE)
    assert found.weights(2) == found.weights() - (found.cut + found.experts + found.head) / 2
    assert found.cut > 0


def test_keys_and_values() -> None:
    from transformers import DynamicCache

    for shape in (TINY, MIXTURE):
        model, cache = shape.build(torch.device("cpu")), DynamicCache()
        model(torch.zeros(1, 10, dtype=torch.long), past_key_values=cache)
        stored = sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
        found = inventory(shape)
        assert found.cache(10) == stored
        assert found.cache(10, bits=8) == stored / 2
        assert found.cache(10, gpus=2) == (stored / 2 if shape is TINY else stored)  # latents are of no head


# docs/benchmarks.md, whole models and several GPUs: one H200, or two; seconds.
STEPS: list[tuple[str, Callable[[], Inventory], dict[str, Any], float]] = [
    ("8b, batch 1", lambda: of("llama-3-8b"), {"batch": 1, "context": 545}, 1 / 374),
    ("8b, batch 16", lambda: of("llama-3-8b"), {"batch": 16, "context": 545}, 16 / 5304),
    ("8b, batch 64", lambda: of("llama-3-8b"), {"batch": 64, "context": 545}, 64 / 16216),
    ("long", lambda: of("llama-3-8b", layers=8), {"batch": 16, "context": 16417}, 16 / 5345),
    ("long, int8", lambda: of("llama-3-8b", layers=8), {"batch": 16, "context": 16417, "bits": 8}, 16 / 8099),
    ("70b, batch 1", a_tenth_of_70b, {"batch": 1, "context": 545}, 1848e-6),
    ("70b, batch 16", a_tenth_of_70b, {"batch": 16, "context": 545}, 1993e-6),
    ("70b, two GPUs, batch 1", a_tenth_of_70b, {"batch": 1, "context": 545, "gpus": 2}, 1224e-6),
    ("70b, two GPUs, batch 16", a_tenth_of_70b, {"batch": 16, "context": 545, "gpus": 2}, 1334e-6),
    ("mixture, batch 1", lambda: of("qwen3-30b-a3b"), {"batch": 1, "context": 545}, 1 / 1152),
    ("mixture, batch 16", lambda: of("qwen3-30b-a3b"), {"batch": 16, "context": 545}, 16 / 8166),
]
PREFILLS: list[tuple[str, Callable[[], Inventory], int, float]] = [
    ("8b", lambda: of("llama-3-8b"), 1, 16384 / 81924),
    ("8 layers of 8b", lambda: of("llama-3-8b", layers=8), 1, 50.2e-3),
    ("8 layers of 8b, two GPUs", lambda: of("llama-3-8b", layers=8), 2, 32.4e-3),
    ("70b", a_tenth_of_70b, 1, 173.5e-3),
    ("70b, two GPUs", a_tenth_of_70b, 2, 101.0e-3),
]


@pytest.mark.parametrize(("made", "size", "measured"), [point[1:] for point in STEPS], ids=[p[0] for p in STEPS])
def test_steps_that_were_measured(made: Callable[[], Inventory], size: dict[str, Any], measured: float) -> None:
    assert made().step(**size) == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("made", "gpus", "measured"), [p[1:] for p in PREFILLS], ids=[p[0] for p in PREFILLS])
def test_prompts_that_were_measured(made: Callable[[], Inventory], gpus: int, measured: float) -> None:
    assert made().prefill(16384, gpus) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("name", "scheme", "gigabytes"),
    [
        ("llama-3-8b", "int8", 9.1),
        ("llama-3-8b", "int4", 5.7),
        ("llama-3-8b", FLOAT, 16.1),
        ("qwen3-30b-a3b", "int8", 8.8),
        ("qwen3-30b-a3b", FLOAT, 16.3),
    ],
)
def test_weights_that_were_measured(name: str, scheme: str, gigabytes: float) -> None:
    assert of(name, scheme).weights() / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_what_is_left_to_the_rest() -> None:
    # Llama 3 8B with 64 sequences of 578 tokens: the peak was 21.2 GB.
    found = of("llama-3-8b")
    assert 21.2e9 < found.weights() + found.cache(64 * 578) + H200.reserve < 23e9


def test_a_prompt_through_a_mixture_is_not_estimated() -> None:
    with pytest.raises(ValueError, match="prompts through mixtures don't follow this rule"):
        inventory(MIXTURE).prefill(100)


def test_sums_of_gpus() -> None:
    # docs/performance/models.md. With four GPUs NCCL takes another way for 16 rows, and has more of the links for many.
    assert H200.sum_seconds(1, 1e9) == 0
    for gpus, rows, us, error in (
        (2, 1, 9.9, 0.1),
        (2, 16, 11.4, 0.1),
        (2, 16384, 887, 0.1),
        (4, 1, 15.2, 0.1),
        (4, 16, 21.9, 0.3),
        (4, 16384, 1192, 0.15),
    ):
        assert H200.sum_seconds(gpus, rows * 8192 * 2) * 1e6 == pytest.approx(us, rel=error)
    assert H200.sum_seconds(4, 1e9) == pytest.approx(1.5 * H200.sum_seconds(2, 1e9), rel=1e-3)


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scaling.SHAPES, "llama-3-8b", replace(TINY, layers=100))
    scaling.main(["--model", "llama-3-8b", "--scheme", "int8", "--gpus", "1", "--gpus", "2", "--batch", "3"])
    shown = capsys.readouterr().out
    assert "| model | scheme | weights | 1 x H200 | 2 x H200 |" in shown
    assert "| model | GPUs | step, batch 3 | prompt, 8 x 2,048 |" in shown
    assert len([line for line in shown.splitlines() if line.startswith("| llama-3-8b")]) == 3
