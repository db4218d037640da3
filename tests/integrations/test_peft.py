"""LoRA and DoRA over quantized layers, by PEFT and by transformers: train, save, load, and refuse what can't be."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from processes import run_code
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

import qgemm
from integrations.folders import IDS, in_two, load_int8, second_of_two
from qgemm import QuantLinear
from qgemm.integrations.peft import LoraQuantLinear
from qgemm.nn import LinearLayer

TARGETS = ["q_proj", "v_proj", "down_proj"]


def quantized_llama(dtype: torch.dtype = torch.float32) -> Any:
    return qgemm.quantize_model(FAMILIES["llama"]().model.to(dtype))


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **settings})


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=IDS).logits


def fill(model: nn.Module) -> nn.Module:
    """Gives adapters values that matter: B starts as zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_saving_and_loading(tmp_path: Path) -> None:
    base = quantized_llama()
    plain = logits(base)
    frozen = {name: parameter.clone() for name, parameter in base.named_parameters()}
    model = get_peft_model(base, lora(lora_dropout=0.1))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    assert torch.equal(logits(model), plain)  # B is zero
    losses = train(model, 6)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    trained = logits(model)
    assert not torch.equal(trained, plain)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}

    again = PeftModel.from_pretrained(quantized_llama(), tmp_path)
    assert torch.equal(logits(again), trained)
    assert type(again.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")) is LoraQuantLinear
    unloaded = model.unload()
    assert torch.equal(logits(unloaded), plain)
    after = dict(unloaded.named_parameters())
    assert after.keys() == frozen.keys()
    assert all(torch.equal(after[name], value) for name, value in frozen.items())


def test_gradients_are_those_of_the_float_layers() -> None:
    # By autograd through PEFT's own layer over the dequantized weights, which differ by the rounding of activations.
    model, reference = quantized_llama(), quantized_llama()
    reference.dequantize()
    gradients = []
    for one in (model, reference):
        adapted = fill(get_peft_model(one, lora()))
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({n: p.grad for n, p in adapted.named_parameters() if p.requires_grad})
    ours, theirs = gradients
    assert len(ours) == 2 * 2 * len(TARGETS)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() / theirs[name].norm() < 0.1, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_the_sum_is_that_of_pefts_own_layer(dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 32).to(dtype))
    theirs = fill(get_peft_model(network, LoraConfig(target_modules=["0"]), autocast_adapter_dtype=autocast))
    quantized = qgemm.quantize_model(nn.Sequential(nn.Linear(64, 32).to(dtype), nn.Identity()))
    ours = fill(get_peft_model(quantized, LoraConfig(target_modules=["0"])))
    x = torch.randn(5, 64, dtype=dtype)
    assert ours(x).dtype == dtype
    float_layer, layer = theirs.base_model.model[0], ours.base_model.model[0]
    got = ours(x) - layer.base_layer(x)
    wanted = theirs(x) - float_layer.base_layer(x)
    step = torch.finfo(dtype).eps * layer.base_layer(x).abs().max()
    assert wanted.abs().max() > 10 * step
    torch.testing.assert_close(got, wanted, rtol=0.01, atol=4 * step.item())


def test_two_adapters_and_a_mixed_batch() -> None:
    model = fill(get_peft_model(quantized_llama(), lora()))
    model.add_adapter("other", lora(r=2, target_modules=["up_proj", "q_proj"]))
    fill(model)
    first = logits(model)
    model.set_adapter("other")
    second = logits(model)
    assert not torch.equal(first, second)
    with model.disable_adapter():
        plain = logits(model)
    mixed = model(input_ids=IDS.expand(3, -1), adapter_names=["other", "__base__", "default"]).logits
    for row, wanted in zip(mixed, (second, plain, first), strict=True):
        torch.testing.assert_close(row, wanted[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        base = prepare_model_for_kbit_training(quantized_llama(torch.bfloat16))
        assert base.model.norm.weight.dtype == torch.float32
        if checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": reentrant})
            base.enable_input_require_grads()
        model = fill(get_peft_model(base, lora())).train()
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    plain, checkpointed = gradients
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    assert all(gradient.any() for gradient in plain)


@pytest.mark.slow
def test_the_adapters_of_transformers_and_its_trainer(llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    plain = logits(model)
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=True,
    )
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        Trainer(model, arguments, train_dataset=rows)
    model.add_adapter(lora())
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    model.gradient_checkpointing_disable()
    trained = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    again.load_adapter(tmp_path / "adapter")
    assert torch.equal(logits(again), trained)
    again.disable_adapters()
    assert torch.equal(logits(again), plain)
    # An adapter's folder alone, which names the folder of its base.
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(whole), trained)
    assert isinstance(whole.model.layers[0].mlp.up_proj, QuantLinear)


def test_the_trainer_trains_chosen_parameters_without_an_adapter(llama_folder: Path, tmp_path: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, learning_rate=0.1, save_strategy="no", report_to=[], use_cpu=True
    )
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    model = load_int8(llama_folder)
    with pytest.raises(ValueError, match="purely quantized"):  # nothing was chosen: it would leave out most weights
        Trainer(model, arguments, train_dataset=rows)
    model.requires_grad_(False)
    still = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)  # to evaluate or to predict
    assert still.evaluate()["eval_loss"] == pytest.approx(model(IDS[:1], labels=IDS[:1]).loss.item())
    with pytest.raises(RuntimeError, match="does not require grad"):
        still.train()
    norms = [module.weight for module in model.modules() if "RMSNorm" in type(module).__name__]
    for weight in norms:
        weight.requires_grad = True
    before = [weight.clone() for weight in norms]
    Trainer(model, arguments, train_dataset=rows).train()
    assert not any(torch.equal(weight, old) for weight, old in zip(norms, before, strict=True))
    copy.deepcopy(model.hf_quantizer)


def test_gpt2() -> None:
    example = FAMILIES["gpt2"]()
    qgemm.quantize_model(example.model)
    config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model: Any = fill(get_peft_model(example.model, config))
    layer = model.base_model.model.transformer.h[0].attn.c_attn
    assert layer.get_delta_weight("default").shape == layer.base_layer.weight.shape
    assert min(train(model, 3)) > 0


@pytest.mark.parametrize(
    ("scheme", "error", "settings"),
    [
        ("int8", 0.1, {"use_dora": True}),  # rounds activations too
        ("nf4", 1e-5, {"use_dora": True}),
        ("nf4", 1e-5, {"use_dora": True, "lora_dropout": 0.5}),
        ("nf4", 1e-5, {"alora_invocation_tokens": [3]}),  # the third of four tokens
    ],
    ids=str,
)
def test_variants_are_those_of_pefts_own_layer(scheme: str, error: float, settings: dict[str, Any]) -> None:
    results = []
    for is_float in (False, True):
        base: Any = qgemm.quantize_model(FAMILIES["llama"]().model, scheme, fuse=not is_float)
        if is_float:
            base.dequantize()
        plain = base(input_ids=IDS).logits
        model = fill(get_peft_model(base, lora(**settings))).train()
        torch.manual_seed(0)  # of dropout
        result = model(input_ids=IDS, labels=IDS)
        result.loss.backward()
        adapted = (result.logits != plain).any(-1).tolist()[0]
        assert adapted == ([False, False, True, True] if "alora_invocation_tokens" in settings else [True] * 4)
        results.append({"logits": result.logits, **{n: p.grad for n, p in model.named_parameters() if p.requires_grad}})
    ours, theirs = results
    assert len(ours) == 1 + (3 if "use_dora" in settings else 2) * 2 * len(TARGETS)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert (value - theirs[name]).norm() / theirs[name].norm() < error, name


def test_dora_subtracts_the_bias_of_the_float_layer() -> None:
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(64, 32), nn.Identity()), torch.rand(50, 64)
    quantized = qgemm.quantize_model(network, "int8-static-asymmetric", calibration=[x])  # its bias has another part
    reference = nn.Sequential(quantized[0].dequantize())
    config = {"target_modules": ["0"], "use_dora": True}
    ours, theirs = (fill(get_peft_model(base, LoraConfig(**config))) for base in (quantized, reference))
    torch.testing.assert_close(ours(x), theirs(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("is_dora", [False, True])
def test_gpt2s_adapter_is_saved_and_merged_as_in_float(is_dora: bool, tmp_path: Path) -> None:
    # GPT-2's layers have biases, and configs for it say fan_in_fan_out: float ones are a Conv1D.
    example = FAMILIES["gpt2"]()
    config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, use_dora=is_dora, task_type="CAUSAL_LM")
    model: Any = fill(get_peft_model(qgemm.quantize_model(example.model, "int4"), config))
    before = logits(model)
    model.save_pretrained(tmp_path)
    base: Any = qgemm.quantize_model(FAMILIES["gpt2"]().model, "int4")
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path)), before)
    model.dequantize()
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload(safe_merge=True)
    assert type(merged.transformer.h[0].attn.c_attn) is Conv1D
    torch.testing.assert_close(logits(merged), before, rtol=1e-4, atol=1e-4)


def refuse(name: str, message: str, **settings: Any) -> Any:
    return pytest.param(settings, message, id=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        refuse("two", r"only plain LoRA, DoRA .*'use_dora'.*dequantize", alora_invocation_tokens=[1], use_dora=True),
        refuse("QALoRA", r"use_qalora is for PEFT's layers of GPTQ only", use_qalora=True),
        refuse("PiSSA", r"init_lora_weights='pissa' starts from the float weight", init_lora_weights="pissa"),
        refuse("orthogonal", r"'orthogonal' starts from the float weight", init_lora_weights="orthogonal"),
        refuse(
            "parameters",
            r"target_parameters names 'weight' of a QuantLinear",
            target_modules=[],
            target_parameters=["q_proj.weight"],
        ),
    ],
)
def test_what_needs_the_float_weight_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_peft_model(quantized_llama(), lora(**settings))


def test_layers_that_are_split_are_refused_by_name(tmp_path: Path) -> None:
    config = FAMILIES["llama"]().model.config
    config.vocab_size = 96  # two halves
    qgemm.save_quantized(qgemm.quantize_model(AutoModelForCausalLM.from_config(config)), tmp_path)
    refused = (
        r"model\.layers\.0\.self_attn\.q_proj is split among processes, and an adapter isn't: "
        "put adapters on a model that"
    )
    with second_of_two():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=in_two())
        with pytest.raises(ValueError, match=refused):
            get_peft_model(model, lora())
        with pytest.raises(ValueError, match=refused):
            model.add_adapter(lora())


@pytest.mark.parametrize(
    "merge",
    [
        lambda model: model.merge_adapter(),
        lambda model: model.merge_and_unload(),
        lambda model: model.merge_and_unload(safe_merge=True),
        lambda model: model.unmerge_adapter(),
    ],
)
def test_merging_is_refused(merge: Callable[[Any], object]) -> None:
    base: Any = qgemm.quantize_model(FAMILIES["llama"]().model, skip="model.layers.0")
    model: Any = fill(get_peft_model(base, lora()))
    before, weight = logits(model), base.model.layers[0].self_attn.q_proj.weight.clone()
    with pytest.raises(NotImplementedError, match=r"merged"):
        merge(model)
    assert torch.equal(base.model.layers[0].self_attn.q_proj.weight, weight)  # no layer in float was merged, either
    assert torch.equal(logits(model), before)


def test_an_adapter_is_merged_into_the_dequantized_model() -> None:
    base = qgemm.quantize_model(FAMILIES["llama"]().model, "nf4", fuse=True)
    model: Any = fill(get_peft_model(base, lora()))
    before = logits(model)
    model.dequantize()
    model.merge_adapter()
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload(safe_merge=True)
    assert not any(isinstance(module, LinearLayer | LoraQuantLinear) for module in merged.modules())
    torch.testing.assert_close(logits(merged), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("added_by", ["peft", "transformers"])
def test_saving_with_an_adapter_warns_of_the_ways_out(added_by: str, tmp_path: Path) -> None:
    model = quantized_llama()
    if added_by == "peft":
        adapted: Any = get_peft_model(model, lora())
    else:
        (adapted := model).add_adapter(lora())
    with pytest.warns(UserWarning, match=r"with adapters of PEFT, .* unload\(\) .* merge_and_unload\(\)"):
        qgemm.save_quantized(adapted, tmp_path / "adapted")
    if added_by == "peft":
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            qgemm.save_quantized(adapted.unload(), tmp_path / "unloaded")
        qgemm.load_quantized(tmp_path / "unloaded")


@pytest.mark.parametrize("targets", [["in_proj"], ["out_proj"], ["in_proj", "out_proj"], ["fc1"]])
def test_an_adapter_on_the_attention_of_pytorch_is_merged_too(targets: list[str]) -> None:
    example = FAMILIES["siglip_vision"]()
    names = list(example.model.state_dict())
    model: Any = get_peft_model(qgemm.quantize_model(example.model, "int8-weight"), LoraConfig(target_modules=targets))
    fill(model).eval()

    def pooled(model: Any) -> Tensor:
        with torch.no_grad():
            return model(**example.inputs).pooler_output

    before = pooled(model)
    model.dequantize()
    torch.testing.assert_close(pooled(model), before, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload()
    torch.testing.assert_close(pooled(merged), before, rtol=1e-4, atol=1e-4)
    assert type(merged.head.attention) is nn.MultiheadAttention
    assert list(merged.state_dict()) == names


def test_a_layer_under_an_adapter_stays_in_float() -> None:
    # PEFT's own layer would add to the int8 values when it merges.
    model: Any = fill(get_peft_model(FAMILIES["llama"]().model, lora(modules_to_save=["lm_head"])))
    qgemm.quantize_model(model)
    attention = model.base_model.model.model.layers[0].self_attn
    assert type(attention.q_proj.base_layer) is nn.Linear
    assert isinstance(attention.o_proj, QuantLinear)
    reasons = {record.reason for record in qgemm.report(model).kept if "base_layer" in record.name}
    assert reasons == {"it has an adapter: quantize first, then attach the adapter"}
    before = logits(model)
    torch.testing.assert_close(logits(model.merge_and_unload()), before, rtol=0.05, atol=0.05)


def test_other_configs_are_as_they_were() -> None:
    plain = get_peft_model(FAMILIES["llama"]().model, lora())
    assert type(plain.base_model.model.model.layers[0].self_attn.q_proj) is peft.tuners.lora.layer.Linear
    assert "custom" not in str(lora().to_dict())


@pytest.mark.slow
def test_any_order_of_imports() -> None:
    """qgemm first, and no word of it afterwards; and a reload, as a notebook's autoreload does."""
    get_peft_model(qgemm.quantize_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU())), LoraConfig(target_modules=["0"]))
    code = """
import importlib, sys
import qgemm
assert not {"peft", "transformers"} & set(sys.modules)
from torch import nn
model = qgemm.quantize_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
from peft import LoraConfig, get_peft_model
layer = get_peft_model(model, LoraConfig(target_modules=["0"])).base_model.model[0]
module = sys.modules["qgemm.integrations.peft"]
assert type(layer) is module.LoraQuantLinear
importlib.reload(module)
model = qgemm.quantize_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
assert type(get_peft_model(model, LoraConfig(target_modules=["0"])).base_model.model[0]) is module.LoraQuantLinear
awaited = {finder._module for finder in sys.meta_path if type(finder).__module__.startswith("qgemm")}
assert awaited.isdisjoint(sys.modules)
"""
    run_code(code)


@pytest.mark.parametrize("scheme", ["int8", "mxfp4"])
@pytest.mark.parametrize(
    "names",
    [
        {"target_modules": ["experts"]},
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
        {"target_modules": "all-linear"},  # PEFT's names for Mixtral include parameters of experts
    ],
)
def test_experts_take_no_adapter(names: dict[str, Any], scheme: str) -> None:
    # PEFT by itself would round the adapter as the weights are.
    model = qgemm.quantize_model(MIXTURES["mixtral"]().model, scheme)
    with pytest.raises(
        ValueError, match=f"an adapter can't be put on QuantExperts, whose weights are in {scheme}: name the lay"
    ):
        get_peft_model(model, LoraConfig(r=4, **names))
    assert not any(isinstance(module, LoraQuantLinear) for module in model.modules())  # nothing is left for a next try


# With int8, activations are rounded too.
@pytest.mark.parametrize(
    ("family", "scheme", "error"), [("mixtral", "int8", 0.1), ("mixtral", "mxfp4", 1e-5), ("gpt_oss", "mxfp4", 1e-5)]
)
def test_adapters_around_experts_have_the_gradients_of_float_experts(family: str, scheme: str, error: float) -> None:
    gradients = []
    for is_float in (False, True):
        example = MIXTURES[family]()
        base: Any = qgemm.quantize_model(example.model, scheme)
        if is_float:
            base.dequantize()
        model = fill(get_peft_model(base, lora(target_modules=["q_proj", "o_proj"])))
        model(**example.inputs, labels=example.inputs["input_ids"]).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    ours, theirs = gradients
    # Those of the first layer too, through the experts of both.
    assert len(ours) == 8  # of two projections in two blocks
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() / theirs[name].norm() < error, name
