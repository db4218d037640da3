"""What settings of GGUF files say about positions, scales and mixtures is in the config, or refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qgemm
from checkpoint.gguf_files import write_file
from checkpoint.gguf_models import float_model, settings_of, write_model
from qgemm import CheckpointError
from qgemm.checkpoint.gguf import read_gguf
from qgemm.checkpoint.gguf_config import model_config

LLAMA3 = {
    **{"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
LONG = {"rope_factors_long.weight": np.arange(1, 5, dtype="f4"), "rope_factors_short.weight": np.ones(4, "f4")}


def rotary(path: Path) -> Any:
    return qgemm.load_quantized(path).config.rope_parameters


def wanted(architecture: str, **changes: Any) -> Any:
    return float_model(architecture, **changes).config.rope_parameters


def scaled(kind: str, factor: float | None = 4.0, **others: Any) -> dict[str, Any]:
    said = {"type": kind, "factor": factor, **others}
    return {f"rope__scaling__{name}": value for name, value in said.items() if value is not None}


def test_linear(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", "llama", **scaled("linear"))
    assert rotary(path) == wanted("llama", rope_scaling={"rope_type": "linear", "factor": 4.0})
    # Those of Gemma 3 are scaled in layers without a window alone.
    path = write_model(tmp_path / "a.gguf", "gemma3", **scaled("linear"))
    assert rotary(path) == wanted("gemma3", rope_scaling={"rope_type": "linear", "factor": 4.0})
    # llama.cpp takes a factor alone for that of linear scaling.
    path = write_model(tmp_path / "a.gguf", "qwen2", rope__scaling__factor=4.0)
    assert rotary(path) == wanted("qwen2", rope_scaling={"rope_type": "linear", "factor": 4.0})
    for said in (scaled("none"), scaled("linear", 1.0), scaled("linear", 0.0), scaled("linear", None)):
        assert rotary(write_model(tmp_path / "a.gguf", "llama", **said)) == wanted("llama")


def test_yarn(tmp_path: Path) -> None:
    said = scaled("yarn", original_context_length=16)
    path = write_model(tmp_path / "a.gguf", "qwen2", **said)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert rotary(path) == wanted("qwen2", rope_scaling=scaling)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3(factor: float, tmp_path: Path) -> None:
    """Files hold by what each frequency is divided."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = float_model("llama", rope_scaling={**LLAMA3, "factor": factor}).config
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = 1 / (5000.0 ** (torch.arange(8) / 8) * frequencies)
    path = write_model(tmp_path / "a.gguf", "llama", "Q8_0", {"rope_freqs.weight": factors.numpy()})
    assert rotary(path) == config.rope_parameters
    write_model(path, "llama", "Q8_0", {"rope_freqs.weight": factors.numpy() * 2})
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight holds factors that aren't those of Llama 3"):
        qgemm.load_quantized(path)


@pytest.mark.parametrize("shape", [(), (2, 4)])
def test_factors_that_are_no_vector(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", "llama", "Q8_0", {"rope_freqs.weight": np.ones(shape, "f4")})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has shape .*, and must be a vector"):
        qgemm.load_quantized(path)


def test_longrope(tmp_path: Path) -> None:
    said = scaled("longrope", None, original_context_length=16, attn_factor=1.25)
    model: Any = qgemm.load_quantized(write_model(tmp_path / "a.gguf", "phi3", "Q8_0", LONG, **said))
    long, short = (value.tolist() for value in LONG.values())
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": 1.25}
    config = float_model("phi3", rope_scaling=scaling, original_max_position_embeddings=16).config
    assert model.config.rope_parameters == config.rope_parameters
    assert model.config.original_max_position_embeddings == 16
    only = {name: LONG[name] for name in list(LONG)[:1]}
    for tensors, others in ((only, said), ({}, said), (LONG, {}), (LONG, scaled("longrope", None))):
        write_model(tmp_path / "a.gguf", "phi3", "Q8_0", tensors, **others)
        with pytest.raises(CheckpointError, match="positions are scaled as LongRoPE does, which qgemm reads for Phi 3"):
            qgemm.load_quantized(tmp_path / "a.gguf")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no factor": ("llama", scaled("yarn", None), "positions are scaled as 'yarn' by None"),
    "a factor that is none": ("llama", scaled("yarn", math.inf), "positions are scaled as 'yarn' by inf"),
    "another way": ("llama", scaled("ntk"), "positions are scaled as 'ntk' by 4.0"),
    "longrope": ("llama", scaled("longrope"), "positions are scaled as LongRoPE does"),
    "attention of yarn": ("llama", scaled("yarn", attn_factor=2.0), "rope.scaling.attn_factor is 2.0"),
    "attention of Phi": ("phi3", scaled("yarn", attn_factor=2.0), "rope.scaling.attn_factor is 2.0"),
    "a bound of yarn": ("llama", scaled("yarn", yarn_beta_fast=16.0), "rope.scaling.yarn_beta_fast is 16.0, which"),
    "a mixture": ("qwen2", {"expert_count": 8}, "is a mixture of experts, which transformers doesn't read as qwen2"),
    "an encoder": ("qwen2", {"attention__causal": False}, "attention.causal is False, which transformers doesn't"),
    "another scale": ("llama", {"attention__scale": 0.5}, "attention.scale is 0.5, which transformers doesn't"),
    "fewer layers with a window": ("gemma3", {"attention__sliding_window_pattern": 4}, "window_pattern is 4, and"),
    "no window": ("gemma3", {"attention__sliding_window": 0}, "doesn't state attention.sliding_window"),
    "no window of Gemma 2": ("gemma2", {"attention__sliding_window": 0}, "doesn't state attention.sliding_window"),
    "positions in windows": ("gemma3", {"rope__freq_base_swa": 5e5}, "rope.freq_base_swa is 500000.0, and"),
    "a part of each head": ("qwen2", {"rope__dimension_count": 8}, "rotates 8 of a head's 16 values"),
    "a weight of experts": ("qwen3moe", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5, which"),
    "softmax": ("minimax-m2", {"expert_gating_func": 1}, "expert_gating_func is 1, and"),
    "attention without yarn": ("llama", {"rope__scaling__attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0"),
    "norms": ("mamba", {"ssm__dt_b_c_rms": True}, "ssm.dt_b_c_rms is True, which transformers doesn't compute for"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    architecture, changes, problem = REFUSED[case]
    path = write_file(tmp_path / "a.gguf", architecture, settings_of(architecture, **changes), {})
    with pytest.raises(CheckpointError, match=rf"a\.gguf.*{problem}"):
        read_gguf(path).config("float32")


def test_architectures_that_are_refused(tmp_path: Path) -> None:
    settings = settings_of("llama")
    path = write_file(tmp_path / "a.gguf", "deci", settings, {})
    with pytest.raises(CheckpointError, match=r"transformers doesn't read deci as llama\.cpp writes it"):
        read_gguf(path).config("float32")
    path = write_file(tmp_path / "a.gguf", "command-r", settings, {})
    with pytest.raises(CheckpointError, match="architecture command-r is not supported yet"):
        read_gguf(path).config("float32")
    with pytest.raises(CheckpointError, match="doesn't say of which architecture"):
        model_config(path, {}, b"", "float32")


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_scale_of_queries(architecture: str, layers: int, tmp_path: Path) -> None:
    """In the largest Gemma it is that of heads as wide as if they shared the hidden size."""
    for count, size in ((layers, 16), (2, 32)):
        path = write_file(tmp_path / "a.gguf", architecture, settings_of(architecture, block_count=count), {})
        assert read_gguf(path).config("float32")["query_pre_attn_scalar"] == size


def test_the_bound_of_logits(tmp_path: Path) -> None:
    settings = settings_of("gemma3", final_logit_softcapping=30.0)
    assert (
        read_gguf(write_file(tmp_path / "a.gguf", "gemma3", settings, {})).config("float32")["final_logit_softcapping"]
        == 30
    )


def test_phi_without_a_window(tmp_path: Path) -> None:
    """Files of Phi 4 state 0, which transformers would take for a window that no token is in."""
    models = [
        qgemm.load_quantized(write_model(tmp_path / "a.gguf", "phi3", attention__sliding_window=size), dtype="float32")
        for size in (0, 64)
    ]
    assert [model.config.sliding_window for model in models] == [None, 64]
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        found, wanted = (model(ids).logits for model in models)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("architecture", ["gemma3", "lfm2", "minimax-m2"])
def test_the_base_of_rotary_frequencies(architecture: str, tmp_path: Path) -> None:
    """What llama.cpp takes if a file states none; transformers' own is another one for some models."""
    settings = settings_of(architecture)
    del settings["rope.freq_base"]
    path = write_file(tmp_path / "a.gguf", architecture, settings, {})
    assert read_gguf(path).config("float32")["rope_theta"] == 10000.0


def test_settings_that_change_nothing(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.gguf", "gemma2", settings_of("gemma2", rope__freq_base=math.nan), {})
    assert read_gguf(path).config("float32")["sliding_window"] == 8
    said = {"attention.sliding_window_pattern": 6, "rope.freq_base_swa": 10000.0, "rope.dimension_count": 32}
    path = write_file(tmp_path / "a.gguf", "gemma3", settings_of("gemma3") | said, {})
    assert read_gguf(path).config("float32")["sliding_window"] == 8


def test_each_mixture_has_a_gating_function_of_its_own(tmp_path: Path) -> None:
    for architecture, function in (("qwen3moe", 1), ("minimax-m2", 2)):  # softmax, sigmoid
        settings = settings_of(architecture, expert_gating_func=function)
        assert read_gguf(write_file(tmp_path / "a.gguf", architecture, settings, {})).config("float32")


def test_a_model_called_mistral(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", "llama", general__name="mistral")
    assert type(qgemm.load_quantized(path)).__name__ == "LlamaForCausalLM"


def test_a_vocabulary(tmp_path: Path) -> None:
    """Its size is that of the embedding; transformers would take seconds to read the tokens."""
    path = write_model(tmp_path / "a.gguf", "gpt2", tokenizer__ggml__tokens=[str(each) for each in range(5000)])
    assert read_gguf(path).config("float32")["vocab_size"] == 97


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "a.gguf", "llama", settings_of("llama"), {})
    monkeypatch.setattr("transformers.utils.import_utils.is_gguf_available", lambda: False)
    with pytest.raises(ImportError, match=r'a\.gguf is read with the package gguf: pip install "gguf>=0.10"'):
        qgemm.load_quantized(path)
    monkeypatch.setitem(sys.modules, "transformers.modeling_gguf_pytorch_utils", None)
    with pytest.raises(ImportError, match=r'is read with transformers: pip install "transformers>=5.17" "gguf>=0.10"'):
        qgemm.load_quantized(path)
