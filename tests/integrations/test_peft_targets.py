"""Which layers of quantized models get adapters of PEFT: all linear ones by "all-linear", and errors for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    OSFConfig,
    PeftConfig,
    TinyLoraConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import AutoModelForSequenceClassification

import qgemm
from qgemm.integrations.peft import LoraQuantLinear


def adapted(model: torch.nn.Module) -> set[str]:
    return {name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")}


def all_linear(model: Any, **settings: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules="all-linear", **settings))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "gpt_oss"])
def test_all_linear_chooses_what_it_chooses_in_float(name: str) -> None:
    make = {**FAMILIES, **MIXTURES}[name]
    model = all_linear(qgemm.quantize_model(make().model, fuse=True))
    names = adapted(model)
    assert names
    assert names == adapted(all_linear(make().model))
    assert any(isinstance(layer, LoraQuantLinear) for layer in model.modules())
    model.add_adapter("second", LoraConfig(target_modules="all-linear"))
    assert adapted(model) == names


def test_all_linear_leaves_out_a_quantized_head() -> None:
    model = qgemm.quantize_model(FAMILIES["llama"]().model, include="lm_head")
    assert adapted(all_linear(model)) == adapted(all_linear(FAMILIES["llama"]().model))
    heads = [AutoModelForSequenceClassification.from_config(FAMILIES["llama"]().model.config) for _ in range(2)]
    ours = all_linear(qgemm.quantize_model(heads[0]), task_type="SEQ_CLS")
    assert adapted(ours) == adapted(all_linear(heads[1], task_type="SEQ_CLS"))


@pytest.mark.parametrize(
    "config",
    [
        AdaLoraConfig(target_modules=["q_proj"], total_step=10),
        AdaLoraConfig(target_modules="all-linear", total_step=10),
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        LNTuningConfig(target_modules=["q_proj"]),
        LoHaConfig(target_modules=["q_proj"]),
        OFTConfig(target_modules=["q_proj"], r=2, oft_block_size=0),
        OSFConfig(target_modules=["q_proj"]),  # PEFT alone would train nothing
        TinyLoraConfig(target_modules=["q_proj"]),
        TrainableTokensConfig(target_modules=["q_proj"], token_indices=[1]),
        VeraConfig(target_modules=["q_proj"]),
        VeraConfig(target_modules="all-linear"),
    ],
    ids=lambda config: f"{config.peft_type.value}-{config.target_modules}",
)
def test_other_tuners_are_refused_before_anything_changes(config: PeftConfig) -> None:
    model = qgemm.quantize_model(FAMILIES["llama"]().model, "nf4")
    before = {name: type(module) for name, module in model.named_modules()}
    refused = (
        rf"{config.peft_type.value} can't adapt model\.layers\.0\.self_attn\.q_proj, which is quantized \(nf4\); on "
        "quantized layers only LoRA and its variant DoRA work: .*dequantize"
    )
    with pytest.raises(ValueError, match=refused):
        get_peft_model(model, config)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_tuners_of_float_layers_work() -> None:
    for config in (IA3Config(target_modules=["lm_head"], feedforward_modules=[]), LNTuningConfig()):
        model: Any = get_peft_model(qgemm.quantize_model(FAMILIES["llama"]().model, "nf4"), config)
        example = FAMILIES["llama"]()
        model(**example.inputs, labels=example.inputs["input_ids"]).loss.backward()
        trained = [p.grad for p in model.parameters() if p.requires_grad]
        assert trained
        assert all(gradient is not None and gradient.any() for gradient in trained)


@pytest.mark.parametrize("saved", ["o_proj", "mlp"])
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_modules_to_save_must_be_float(saved: str, scheme: str) -> None:
    model = qgemm.quantize_model(FAMILIES["llama"]().model, scheme)
    with pytest.raises(ValueError, match=rf"modules_to_save names '{saved}', but model\.layers\.0\..*is quantized and"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=[saved]))
