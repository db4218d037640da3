"""Folders of qgemm in vLLM: ``vllm serve`` on a port gives the tokens of transformers, and so does every scheme."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qgemm
from integrations.vllm_engine import (
    NEW,
    PROMPTS,
    WORDS,
    answers,
    calibration_data,
    compiled_as_on_a_gpu,
    counting_fused,
    engine,
    model,
    quantized,
    save_tokenizer,
    server,
    tokens_of,
    tokens_of_transformers,
    tokens_of_vllm,
)

pytestmark = pytest.mark.vllm
BLOCK = 32  # tokens whose keys and values are cached together; a multiple of what a CPU has
# Without them two logits of the model in fp8 are so close that rounding decides, on some CPUs otherwise than on others.
BIASES = {"attention_bias": True, "mlp_bias": True}
CHUNK = 16  # tokens of a prompt that are computed together
SCHEMES = (
    "int8", "int8-static", "int8-static-asymmetric", "int8-hadamard", "int8-outliers-16", "int8-weight",
    "fp8", "fp8-static", "fp8-block", "fp8-weight",
    "int4", "int4-channel", "int4-32-asymmetric", "int4-32-asymmetric-ordered", "int4-int8",
    "mxfp4", "mxfp8", "nvfp4", "nf4", "bnb-fp4",
)  # fmt: skip


def test_a_server_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    from openai import OpenAI

    expected = quantized(tmp_path / "int8", "int8", {"attention_bias": True})
    save_tokenizer(tmp_path / "int8")
    with server(tmp_path / "int8", tmp_path, "--enforce-eager") as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        found = []
        for prompt in PROMPTS:
            body = {"return_token_ids": True, "ignore_eos": True}
            answer = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=NEW, temperature=0, extra_body=body
            )
            found.append(answer.choices[0].model_dump()["token_ids"])
    assert found == expected


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_gives_the_tokens_of_transformers(scheme: str, tmp_path: Path) -> None:
    expected = quantized(tmp_path / scheme, scheme, BIASES if "int8" in scheme or scheme == "fp8" else None)
    assert tokens_of_vllm(tmp_path / scheme) == expected


def test_a_quantized_head_beside_tied_embeddings(tmp_path: Path) -> None:
    expected = quantized(tmp_path / "head", "int8", include="lm_head")
    assert tokens_of_vllm(tmp_path / "head") == expected
    expected = quantized(tmp_path / "tied", "int8", {"tie_word_embeddings": True})
    assert tokens_of_vllm(tmp_path / "tied") == expected


def test_files_of_save_quantized_in_shards(tmp_path: Path) -> None:
    made = qgemm.quantize_model(model(), progress=False)
    qgemm.save_quantized(made, tmp_path / "int8", max_shard_size="400KB")
    assert len(list((tmp_path / "int8").glob("*.safetensors"))) > 2
    assert tokens_of_vllm(tmp_path / "int8") == tokens_of_transformers(made)


def test_layers_left_in_float(tmp_path: Path) -> None:
    expected = quantized(tmp_path / "some", "int8", skip=["model.layers.0.self_attn", "model.layers.1.mlp.down_proj"])
    assert tokens_of_vllm(tmp_path / "some") == expected


def test_a_part_of_a_merged_layer_in_float_is_refused_by_name(tmp_path: Path) -> None:
    quantized(tmp_path / "part", "int8", skip="model.layers.0.self_attn.k_proj")
    with pytest.raises(ValueError, match=r"layers.0.self_attn.qkv_proj as one layer.*k_proj: float"):
        tokens_of_vllm(tmp_path / "part")


@pytest.mark.parametrize("scheme", ["int8", "mxfp4", "nvfp4"])  # scales are float32, e8m0 and e4m3
def test_a_lost_scale_is_named(scheme: str, tmp_path: Path) -> None:
    quantized(tmp_path / "lost", scheme)
    from checkpoint.rewriting import rewrite_file
    from safetensors.torch import load_file

    path = tmp_path / "lost" / "model.safetensors"
    stored = load_file(path)
    del stored["model.layers.1.mlp.down_proj.weight_scale"]
    rewrite_file(path, stored)
    with pytest.raises(ValueError, match=r"layers.1.mlp.down_proj.weight_scale isn't in the files, or not all of it"):
        tokens_of_vllm(tmp_path / "lost")


def test_a_float_folder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "float")
    with pytest.raises(ValueError, match="the model is in float: quantize it first, with"):
        tokens_of_vllm(tmp_path / "float", quantization="qgemm")


def test_another_version_of_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized(tmp_path / "int8", "int8")
    import vllm
    from vllm.model_executor.layers import quantization

    from qgemm.integrations.vllm import register

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    register()
    with pytest.raises(ValueError, match=r"vLLM 0.99.0 isn't supported by this qgemm, which runs in 0.22 to 0.33"):
        tokens_of_vllm(tmp_path / "int8")


@pytest.mark.parametrize("scheme", ["int8", "nvfp4"])
def test_compiled_by_vllm(scheme: str, tmp_path: Path) -> None:
    # nvfp4: parts with global scales of their own are a product each.
    expected = quantized(tmp_path / scheme, scheme, skip="model.layers.1")
    assert tokens_of_vllm(tmp_path / scheme, enforce_eager=False) == expected


@pytest.fixture
def fused(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Options with which vLLM compiles as on a GPU; in the end, all of a model of two layers must have been fused."""
    counts = tmp_path / "counts"
    with counting_fused(counts), compiled_as_on_a_gpu() as options:
        yield options
    assert counts.read_text() == "1 3 2 ", "the norms and activations between what attends"


@pytest.mark.parametrize("scheme", ["int8", "int8-static", "fp8"])
def test_compiled_with_fused_kernels(scheme: str, fused: dict[str, Any], tmp_path: Path) -> None:
    expected = quantized(tmp_path / "folder", scheme, BIASES if scheme == "fp8" else None)
    assert tokens_of_vllm(tmp_path / "folder", **fused) == expected


def test_a_compressed_tensors_checkpoint_with_fused_kernels(fused: dict[str, Any], tmp_path: Path) -> None:
    made = qgemm.quantize_model(model(attention_bias=True), progress=False)
    qgemm.save_quantized(made, tmp_path / "theirs", format="compressed-tensors")
    assert tokens_of_vllm(tmp_path / "theirs", quantization="qgemm", **fused) == tokens_of_transformers(made)


def test_prefix_caching(tmp_path: Path) -> None:
    prefix = [(7 * i) % WORDS for i in range(40)]
    prompts = [[*prefix, 5, 9], [*prefix, 11], [*prefix, 5, 9]]
    made = qgemm.quantize_model(model(), progress=False)
    made.save_pretrained(tmp_path / "int8")
    expected = tokens_of_transformers(made, prompts)
    served = engine(tmp_path / "int8", enable_prefix_caching=True, block_size=BLOCK)
    for at, prompt in enumerate(prompts):
        (answer,) = answers(served, [prompt])
        assert answer.num_cached_tokens == (0 if at == 0 else len(prefix) // BLOCK * BLOCK)
        assert tokens_of([answer]) == expected[at : at + 1]


def test_chunked_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    steps, schedule = [], Scheduler.schedule

    def record(self: Any, *arguments: Any, **options: Any) -> Any:
        out = schedule(self, *arguments, **options)
        steps.append(list(out.num_scheduled_tokens.values()))
        return out

    monkeypatch.setattr(Scheduler, "schedule", record)
    expected = quantized(tmp_path / "int8", "int8")
    served = engine(tmp_path / "int8", enable_prefix_caching=False, max_num_batched_tokens=CHUNK)
    assert tokens_of(answers(served, PROMPTS[-1:])) == expected[-1:]
    assert [sum(step) for step in steps if sum(step) > 1] == [CHUNK, CHUNK, 5], "of the 37 tokens of the prompt"
    # Chunks of one prompt beside new tokens of others.
    steps.clear()
    assert tokens_of(answers(served)) == expected
    assert any(1 in step and max(step) > 1 for step in steps)


def test_lora(tmp_path: Path) -> None:
    # With activations in float, so that what vLLM rounds otherwise isn't rounded to another int8 value.
    made: Any = qgemm.quantize_model(model(), "int8-weight", progress=False)
    made.save_pretrained(tmp_path / "base")
    peft = pytest.importorskip("peft")
    names = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    adapted = peft.get_peft_model(made, peft.LoraConfig(r=8, lora_alpha=16, target_modules=names)).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = tokens_of_transformers(adapted)
    with adapted.disable_adapter():
        assert tokens_of_transformers(adapted) != expected
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    assert tokens_of_vllm(tmp_path / "base", tmp_path / "adapter", **options) == expected


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
def test_a_compressed_tensors_checkpoint_on_our_kernel(scheme: str, tmp_path: Path) -> None:
    # In a merged layer, parts with static scales of their own have one of all: here they see the same input.
    calibration = calibration_data() if scheme != "int8" else None
    made = qgemm.quantize_model(model(attention_bias=True), scheme, calibration=calibration, progress=False)
    qgemm.save_quantized(made, tmp_path / "theirs", format="compressed-tensors")
    from qgemm.integrations.vllm import compressed_tensors

    used = []
    apply = compressed_tensors.QGemmInt8Kernel.apply_weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compressed_tensors.QGemmInt8Kernel,
            "apply_weights",
            lambda self, layer, x, bias=None: (used.append(x.shape), apply(self, layer, x, bias))[1],
        )
        found = tokens_of_vllm(tmp_path / "theirs", quantization="qgemm")
        assert found == tokens_of_transformers(made)
        assert used
        # Another model of the process, without the flag, has vLLM's own kernel.
        used.clear()
        tokens_of_vllm(tmp_path / "theirs")
        assert not used


def test_a_compressed_tensors_checkpoint_of_others_stays_theirs() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    theirs = {"quant_method": "compressed-tensors"}
    own = get_quantization_config("qgemm")
    assert own.override_quantization_method(theirs, "qgemm") == "qgemm"
    for user_quant in (None, "compressed-tensors"):
        assert own.override_quantization_method(theirs, user_quant) is None
    assert own.override_quantization_method({"quant_method": "fp8"}, "qgemm") is None


@pytest.mark.parametrize(("channelwise", "symmetric"), [(True, False), (False, True), (False, False)])
def test_our_kernel_for_other_int8_layers(channelwise: bool, symmetric: bool) -> None:
    """A scale a part, and activations with zero points: against float64."""
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearLayerConfig

    from qgemm.integrations.vllm.compressed_tensors import QGemmInt8Kernel

    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    config = Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme=True, is_channelwise=channelwise, input_symmetric=symmetric
    )
    layer = torch.nn.Module()
    layer.logical_widths = [32, 16]
    weight = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
    scale = torch.rand(48, 1) if channelwise else torch.rand(2)
    points = torch.tensor([-20, 5], dtype=torch.int8)
    values = [weight, scale, torch.tensor([0.02, 0.015]), None if symmetric else points]
    for name, value in zip(names, values, strict=False):
        layer.register_parameter(name, None if value is None else torch.nn.Parameter(value, requires_grad=False))
    kernel = QGemmInt8Kernel(config, names)
    kernel.process_weights_after_loading(layer)
    x, bias = torch.rand(5, 64) * 2.4, torch.randn(48)  # within either range
    out = kernel.apply_weights(layer, x, bias)
    rows = scale.double() if channelwise else scale.double().repeat_interleave(torch.tensor([32, 16]))[:, None]
    exact = x.double() @ (weight.double() * rows).t() + bias
    assert (out - exact).norm() / exact.norm() < 0.01
    assert not QGemmInt8Kernel.can_implement(
        Int8ScaledMMLinearLayerConfig(is_static_input_scheme=False, is_channelwise=True, input_symmetric=False)
    )[0]
