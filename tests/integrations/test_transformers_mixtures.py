"""from_pretrained and save_pretrained of models with experts, whose tensors are many in float files and few in ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.rewriting import edited, rewrite_file
from families.example import Example
from families.mixtures import MIXTURES
from safetensors.torch import load_file, save_file
from streaming.files import assert_same_files
from torch import nn
from transformers import Mxfp4Config

import qgemm
from integrations.folders import assert_same, edit_weights
from qgemm.integrations.transformers import QGemmQuantizer
from qgemm.nn import QuantExperts
from qgemm.numerics.formats import INT8

# A line each for the dtypes, in turn, so that both are seen with many layouts.
DTYPES = torch.float32, torch.bfloat16
# Experts in files as Qwen 3's or GLM 4's.
ALIKE = ("olmoe", "flex_olmo", "dots1")
IN_EVERY_FORMAT: list[Any] = [
    pytest.param(name, DTYPES[number % 2], "int8", marks=pytest.mark.complete if name in ALIKE else [])
    for number, name in enumerate(MIXTURES)
]
IN_EVERY_FORMAT += [
    pytest.param(name, DTYPES[(number + place) % 2], scheme, marks=[] if number == 2 * place else pytest.mark.complete)
    for number, scheme in enumerate(("mxfp4", "int4-32", "fp8-block", "fp8"))
    for place, name in enumerate(("gpt_oss", "mixtral"))
]


def experts_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantExperts)]


@pytest.mark.slow(quick=["mixtral-torch.float32-int8"])
@pytest.mark.parametrize(("family", "dtype", "scheme"), IN_EVERY_FORMAT, ids=str)
def test_round_trips(family: str, dtype: torch.dtype, scheme: str, tmp_path: Path) -> None:
    example = MIXTURES[family]()
    cls: Any = type(example.model)
    example.model.to(dtype).save_pretrained(tmp_path / "float")
    in_place = qgemm.quantize_model(cls.from_pretrained(tmp_path / "float", dtype=dtype), scheme)
    on_load = cls.from_pretrained(tmp_path / "float", dtype=dtype, quantization_config=qgemm.QGemmConfig(scheme))
    assert {on_load.get_submodule(name).scheme.name for name in experts_of(on_load)} == {scheme}
    assert_same(on_load, in_place)
    assert qgemm.report(on_load) == qgemm.report(in_place)
    expected = Example(in_place, example.inputs).output()

    on_load.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    qgemm.save_quantized(in_place, tmp_path / "ours", max_shard_size="20KB")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        for again in (cls.from_pretrained(folder), qgemm.load_quantized(folder)):
            assert_same(again, in_place)
            assert torch.equal(Example(again, example.inputs).output(), expected)
            assert again.dtype == dtype
    qgemm.quantize_checkpoint(tmp_path / "float", tmp_path / "streamed", scheme, max_shard_size="20KB", progress=False)
    assert_same_files(tmp_path / "streamed", tmp_path / "ours")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4", "nemotron_h"])
def test_dequantized_to_the_layout_of_the_class(family: str) -> None:
    example = MIXTURES[family]()
    names = [name for name, _ in example.model.named_parameters()]
    floats = {name: tensor.clone() for name, tensor in example.model.state_dict().items()}
    model: Any = qgemm.quantize_model(example.model)
    quantized = example.output()
    model.dequantize()
    assert not experts_of(model)
    assert {name for name, _ in model.named_parameters()} == set(names)
    for name, tensor in model.state_dict().items():
        assert tensor.shape == floats[name].shape, name
        assert (tensor - floats[name]).abs().max() <= floats[name].abs().max() / INT8.steps, name
    # What differs is that activations aren't rounded now.
    assert torch.cosine_similarity(example.output(), quantized, dim=-1).median() > 0.995


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_base_model_of_a_quantized_folder(family: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    model = qgemm.quantize_model(MIXTURES[family]().model)
    model.save_pretrained(tmp_path / "int8")  # type: ignore[operator]
    assert_same(AutoModel.from_pretrained(tmp_path / "int8"), model.base_model)  # type: ignore[arg-type]


def test_what_has_to_do_with_experts_still_works() -> None:
    model: Any = qgemm.quantize_model(MIXTURES["mixtral"]().model)
    inputs = MIXTURES["mixtral"]().inputs
    expected = Example(model, inputs).output()
    for implementation in ("batched_mm", "eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        assert torch.equal(Example(model, inputs).output(), expected)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.dtype == torch.int8}
    model.initialize_weights()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    tokens = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, inputs["input_ids"].shape[1] + 4)


@pytest.mark.parametrize("family", ["mixtral", "llama4", "gpt_oss"])
def test_gradients_flow_with_checkpointing(family: str) -> None:
    example = MIXTURES[family]()
    model: Any = qgemm.quantize_model(example.model)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        model.zero_grad()
        model(**example.inputs, use_cache=False).logits.square().mean().backward()
        grads.append(model.get_input_embeddings().weight.grad.clone())
    assert grads[0].any()
    assert torch.equal(*grads)
    assert any(
        p.grad is not None and p.grad.any()
        for name, p in model.named_parameters()
        if "router" in name or "gate." in name
    )


OFFLOADED = [("mixtral", "int8"), ("gpt_oss", "int8"), ("gpt_oss", "mxfp4"), ("mixtral", "fp8-block")]


@pytest.mark.parametrize(("family", "scheme"), OFFLOADED)
def test_a_quantized_folder_is_offloaded_and_run(family: str, scheme: str, tmp_path: Path) -> None:
    example = MIXTURES[family]()
    model: Any = qgemm.quantize_model(example.model, scheme)
    model.save_pretrained(tmp_path / "int8")
    expected = example.output()
    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    again = type(model).from_pretrained(tmp_path / "int8", device_map=device_map, offload_folder=tmp_path / "disk")
    assert torch.equal(Example(again, example.inputs).output(), expected)


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    # In 4 bits: transformers makes bfloat16 of it, and that is quantized.
    example = MIXTURES["gpt_oss"]()
    cls: Any = type(example.model)
    example.model.to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[operator]
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        E, K, N = stored.pop(name).shape
        stored[f"{name}_blocks"] = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(118, 122, (E, N, K // 32), dtype=torch.uint8)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    with edited(tmp_path / "config.json") as config:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}

    model = cls.from_pretrained(tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
    expected = Example(model, example.inputs).output()
    qgemm.quantize_model(model)
    out = Example(model, example.inputs).output()
    assert torch.cosine_similarity(out.float(), expected.float(), dim=-1).median() > 0.99
    model.save_pretrained(tmp_path / "int8")
    assert experts_of(model)
    assert_same(cls.from_pretrained(tmp_path / "int8"), model)


def test_a_float_file_that_lacks_an_expert(tmp_path: Path) -> None:
    example = MIXTURES["gpt_oss"]()
    cls: Any = type(example.model)
    example.model.save_pretrained(tmp_path)  # type: ignore[operator]
    edit_weights(tmp_path, model__layers__1__mlp__experts__down_proj_bias=None)
    with pytest.raises(
        qgemm.CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_bias is not in the checkpoint"
    ):
        cls.from_pretrained(tmp_path, quantization_config=qgemm.QGemmConfig())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda t: t[:, :, :-1],
            r"experts\.down_proj has shape \[4, 96, 63\] in the checkpoint; the model's is \[4, 96,",
        ),
        (lambda t: t * torch.nan, r"experts: down_proj of expert 0 holds NaN or Inf"),
    ],
)
def test_float_experts_that_are_damaged(change: Any, problem: str, tmp_path: Path) -> None:
    example = MIXTURES["gpt_oss"]()
    cls: Any = type(example.model)
    example.model.save_pretrained(tmp_path)  # type: ignore[operator]
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.1.mlp.experts.down_proj"
    save_file({**stored, name: change(stored[name]).contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(qgemm.CheckpointError, match=problem):
        cls.from_pretrained(tmp_path, quantization_config=qgemm.QGemmConfig())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: None, r"lacks tensor .*experts\.gate_up_proj_scale of a quantized layer"),
        (lambda t: t[:, :-1], r"experts\.gate_up_proj_scale has shape \[4, 191\]; the model's is \[4, 192\]"),
        (lambda t: t.half(), r"experts\.gate_up_proj_scale is torch\.float16; a quantized layer's is torch\.float32"),
        (lambda t: -t, r"experts\.gate_up_proj_scale holds NaN, Inf or a negative number"),
    ],
)
def test_quantized_experts_that_are_damaged(change: Any, problem: str, tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(MIXTURES["mixtral"]().model)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.1.mlp.experts.gate_up_proj_scale"
    value = change(stored.pop(name))
    rewrite_file(path, {**stored, **({} if value is None else {name: value})})
    with pytest.raises(qgemm.CheckpointError, match=problem):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize(("scheme", "size"), [("int8", 1), ("int4", 0.5)])
def test_the_bytes_of_a_value_that_is_still_to_come(scheme: str, size: float) -> None:
    # By which device_map="auto" counts.
    with torch.device("meta"):
        model: Any = MIXTURES["mixtral"]().model
    quantizer = QGemmQuantizer(qgemm.QGemmConfig(scheme), pre_quantized=False)
    quantizer._process_model_before_weight_loading(model)
    sizes = {name: quantizer.param_element_size(model, name, parameter) for name, parameter in model.named_parameters()}
    experts = {value for name, value in sizes.items() if ".experts." in name}
    assert experts == {size}
    assert {value for name, value in sizes.items() if name.endswith("q_proj.weight")} == {size}
    assert {value for name, value in sizes.items() if name.endswith("norm.weight")} == {4}
