"""from_pretrained and save_pretrained with qgemm, on random models of several families.

Two versions of transformers are meant: the oldest that qgemm takes, and the newest. For another than the installed one:

    pip install --no-deps --target FOLDER transformers==5.23.0
    PYTHONPATH=FOLDER python -m pytest tests/integrations
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import FAMILIES, Example
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
)

import qgemm
from qgemm import QuantLinear
from qgemm.integrations.transformers import QGemmQuantizer, attach_quantizer

IDS = torch.tensor([[1, 2, 3, 4]])


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers())}


def assert_same(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = tensors(model), tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
    assert [type(module) for module in model.modules()] == [type(module) for module in other.modules()]


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def load(folder: Path, **kwargs: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, **kwargs)


def load_int8(folder: Path, **kwargs: Any) -> LlamaForCausalLM:
    return load(folder, quantization_config=qgemm.QGemmConfig(), **kwargs)


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors of a checkpoint in one file, or removes them. Dots in names are written as two underscores."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, value in changes.items():
        name = name.replace("__", ".")
        assert name in stored, name
        if value is None:
            del stored[name]
        else:
            stored[name] = value
    save_file(stored, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_families(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    example = FAMILIES[family]()
    cls = type(example.model)
    example.model.save_pretrained(tmp_path / "float")
    in_place = qgemm.quantize_model(cls.from_pretrained(tmp_path / "float", dtype=dtype))
    on_load = cls.from_pretrained(tmp_path / "float", dtype=dtype, quantization_config=qgemm.QGemmConfig("int8"))
    assert quantized_names(on_load)
    assert_same(on_load, in_place)
    assert qgemm.report(on_load).to_dict() == qgemm.report(in_place).to_dict()

    for number, model in enumerate((in_place, on_load)):
        folder = tmp_path / f"pretrained-{number}"
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        for device_map in (None, "cpu"):
            assert_same(cls.from_pretrained(folder, device_map=device_map), model)
        assert_same(qgemm.load_quantized(folder), model)
    qgemm.save_quantized(on_load, tmp_path / "ours")
    reloaded = cls.from_pretrained(tmp_path / "ours")
    assert_same(reloaded, on_load)
    if dtype == torch.float32:
        assert torch.equal(Example(reloaded, example.inputs).output(), Example(in_place, example.inputs).output())
        # And once more, from what the other loader made.
        loaded = qgemm.load_quantized(tmp_path / "ours")
        loaded.save_pretrained(tmp_path / "again")
        assert_same(cls.from_pretrained(tmp_path / "again"), on_load)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_base_model_of_a_quantized_folder(family: str, tmp_path: Path) -> None:
    model = qgemm.quantize_model(FAMILIES[family]().model).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "int8")
    base = AutoModel.from_pretrained(tmp_path / "int8")
    names = quantized_names(base)
    assert names
    body = model if family == "t5" else model.base_model
    shared = tensors(base).keys() & tensors(body).keys()  # all but BERT's pooler, which is new
    assert {f"{name}.weight" for name in names} <= shared
    for name in shared:
        assert torch.equal(tensors(base)[name], tensors(body)[name]), name
    base.save_pretrained(tmp_path / "base")
    assert_same(AutoModel.from_pretrained(tmp_path / "base"), base)
    assert_same(qgemm.load_quantized(tmp_path / "base"), base)
    # And back: the head is new, the rest is as it was.
    whole = type(model).from_pretrained(tmp_path / "base")
    body = whole if family == "t5" else whole.base_model
    assert quantized_names(body) == names


def test_folder_of_another_model(llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    with pytest.raises(qgemm.CheckpointError, match="GPT2Model has none of the quantized layers"):
        GPT2Model.from_pretrained(tmp_path / "int8", config=with_quantization(tmp_path / "int8"))


def with_quantization(folder: Path) -> GPT2Config:
    values = json.loads((folder / "config.json").read_text())["quantization_config"]
    return GPT2Config(n_layer=1, n_embd=16, n_head=2, quantization_config=values)


def test_both_writers_store_the_same(llama_folder: Path, tmp_path: Path) -> None:
    model = load_int8(llama_folder)
    model.save_pretrained(tmp_path / "theirs")
    qgemm.save_quantized(model, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_auto_class_device_map_and_generation(llama_folder: Path, tmp_path: Path) -> None:
    config = qgemm.QGemmConfig(scheme="int8", skip=["*.o_proj"])
    model = AutoModelForCausalLM.from_pretrained(llama_folder, quantization_config=config, device_map="auto")
    model.save_pretrained(tmp_path / "int8", max_shard_size="50KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "int8", device_map="auto")
    assert_same(again, model)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = again.generate(IDS.to(again.device), **settings)
    assert tokens.shape == (1, 10)
    in_place = qgemm.quantize_model(load(llama_folder), skip="*.o_proj").to(again.device)
    assert torch.equal(tokens, in_place.generate(IDS.to(again.device), **settings))
    static = again.generate(IDS.to(again.device), **settings, cache_implementation="static")
    assert torch.equal(tokens, static)


def test_static_scheme(llama_folder: Path, tmp_path: Path) -> None:
    scales = {name: 0.02 + 0.01 * i for i, name in enumerate(sorted(quantized_names(load_int8(llama_folder))))}
    config = qgemm.QGemmConfig("int8-static", input_scales=scales)
    model = load(llama_folder, quantization_config=config)
    assert_same(model, qgemm.quantize_model(load(llama_folder), "int8-static", input_scales=scales))
    model.save_pretrained(tmp_path / "int8")
    assert_same(load(tmp_path / "int8"), model)


def test_float_weights_go_one_at_a_time(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    quantize = QGemmQuantizer.quantize_weight

    def spy(self: Any, model: nn.Module, name: str, value: torch.Tensor) -> None:
        linears = [m for m in model.modules() if type(m) is nn.Linear and m is not model.lm_head]
        seen.append(sum(linear.weight.device.type != "meta" for linear in linears))
        quantize(self, model, name, value)

    monkeypatch.setattr(QGemmQuantizer, "quantize_weight", spy)
    load_int8(llama_folder)
    assert seen == [0] * 14  # two blocks of seven layers: no float weight is there when the next one comes


def test_model_changed_after_loading_is_saved_as_it_is(llama_folder: Path, tmp_path: Path) -> None:
    model = load_int8(llama_folder)
    attention = model.model.layers[0].self_attn
    attention.q_proj = attention.q_proj.dequantize()
    model.save_pretrained(tmp_path / "int8")
    again = load(tmp_path / "int8")
    assert "model.layers.0.self_attn.q_proj" not in quantized_names(again)
    assert_same(again, model)


def test_copies_and_moved_models_are_saved(llama_folder: Path, tmp_path: Path) -> None:
    model = copy.deepcopy(qgemm.quantize_model(load(llama_folder))).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "int8")
    # .to rounds the rotary frequencies too, which no float checkpoint would hold.
    assert_same(load(tmp_path / "int8"), model)


def test_tied_by_hand(llama_folder: Path, tmp_path: Path) -> None:
    model = qgemm.quantize_model(load(llama_folder))
    model.model.norm.weight = model.model.layers[0].input_layernorm.weight
    model.save_pretrained(tmp_path / "int8")
    again = load(tmp_path / "int8")
    assert again.model.norm.weight is again.model.layers[0].input_layernorm.weight
    assert_same(again, model)


def test_model_inside_of_another_module(llama_folder: Path, tmp_path: Path) -> None:
    outer = nn.ModuleDict({"text": load(llama_folder)})
    qgemm.quantize_model(outer)
    outer["text"].save_pretrained(tmp_path / "int8")
    assert_same(load(tmp_path / "int8"), outer["text"])


def test_dequantize(llama_folder: Path, tmp_path: Path) -> None:
    model = load_int8(llama_folder)
    expected = model.model.layers[0].mlp.up_proj.dequantize().weight
    model.dequantize()
    assert not quantized_names(model)
    model.save_pretrained(tmp_path / "float")
    again = load(tmp_path / "float")
    assert not hasattr(again.config, "quantization_config")
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, expected)


# What goes wrong with quantizers of transformers, one test each.


def test_weights_arrive_as_floats(llama_folder: Path) -> None:
    # A loader that casts to an int8 weight's dtype before it is quantized would give zeros.
    for name, module in load_int8(llama_folder).named_modules():
        if isinstance(module, QuantLinear):
            assert module.weight.abs().amax(dim=1).eq(127).all(), name


@pytest.mark.parametrize(
    ("shape", "leaf"), [((64, 32), "weight"), ((64, 64, 1), "weight"), ((32,), "weight_scale"), ((), "weight_scale")]
)
def test_wrong_shapes_are_refused(shape: tuple[int, ...], leaf: str, llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    dtype = torch.int8 if leaf == "weight" else torch.float32
    edit_weights(tmp_path / "int8", **{f"model__layers__1__self_attn__q_proj__{leaf}": torch.ones(shape, dtype=dtype)})
    with pytest.raises(
        qgemm.CheckpointError, match=rf"model.safetensors: .*layers.1.self_attn.q_proj.{leaf} has shape"
    ):
        load(tmp_path / "int8")


def test_wrong_shape_of_a_float_weight(llama_folder: Path) -> None:
    edit_weights(llama_folder, model__layers__1__self_attn__q_proj__weight=torch.ones(64, 32))
    with pytest.raises(
        qgemm.CheckpointError, match=r"layers.1.self_attn.q_proj.weight has shape \[64, 32\] .*\[64, 64\]"
    ):
        load_int8(llama_folder)


@pytest.mark.parametrize("leaf", ["weight", "weight_scale"])
def test_missing_tensors_are_refused(leaf: str, llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    edit_weights(tmp_path / "int8", **{f"model__layers__0__mlp__up_proj__{leaf}": None})
    with pytest.raises(qgemm.CheckpointError, match=rf"lacks tensor model.layers.0.mlp.up_proj.{leaf}"):
        load(tmp_path / "int8")
    edit_weights(llama_folder, model__layers__0__mlp__up_proj__weight=None)
    with pytest.raises(qgemm.CheckpointError, match=r"layers.0.mlp.up_proj.weight is not in the checkpoint.*skip="):
        load_int8(llama_folder)


def test_missing_scale_in_a_state_dict_is_refused(llama_folder: Path) -> None:
    # Without files to look into beforehand, a scale that never came is uninitialised memory.
    model = load_int8(llama_folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if "0.mlp.up_proj.weight_scale" not in name}
    with pytest.raises(qgemm.CheckpointError, match=r"model.layers.0.mlp.up_proj.weight_scale was not loaded"):
        LlamaForCausalLM.from_pretrained(None, config=LlamaConfig.from_dict(model.config.to_dict()), state_dict=state)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0, -1.0])
def test_bad_scales_are_refused(bad: float, llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    edit_weights(tmp_path / "int8", model__layers__0__mlp__up_proj__weight_scale=torch.full((96,), bad))
    with pytest.raises(qgemm.CheckpointError, match=r"scale model.layers.0.mlp.up_proj.weight_scale is not finite"):
        load(tmp_path / "int8")


def test_float_weight_where_int8_is_wanted(llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    edit_weights(tmp_path / "int8", model__layers__0__mlp__up_proj__weight=torch.rand(96, 64))
    with pytest.raises(
        qgemm.CheckpointError, match=r"up_proj.weight is torch.float32; a quantized layer's is torch.int8"
    ):
        load(tmp_path / "int8")


def test_nan_weight_is_refused(llama_folder: Path) -> None:
    edit_weights(llama_folder, model__layers__0__mlp__up_proj__weight=torch.full((96, 64), torch.nan))
    with pytest.raises(qgemm.CheckpointError, match=r"model.layers.0.mlp.up_proj: weight holds NaN or Inf"):
        load_int8(llama_folder)
    config = qgemm.QGemmConfig(skip="model.layers.0.mlp.up_proj")
    assert len(quantized_names(load(llama_folder, quantization_config=config))) == 13


def test_truncated_shard_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8", max_shard_size="50KB")
    shard = sorted((tmp_path / "int8").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(qgemm.CheckpointError, match=re.escape(str(shard))):
        load(tmp_path / "int8")


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_nothing_of_a_layer_requires_a_gradient(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]().model
    model.save_pretrained(tmp_path / "float")
    model = type(model).from_pretrained(tmp_path / "float", quantization_config=qgemm.QGemmConfig())
    model.save_pretrained(tmp_path / "int8")
    for loaded in (model, type(model).from_pretrained(tmp_path / "int8")):
        frozen = [p for m in loaded.modules() if isinstance(m, QuantLinear) for p in m.parameters()]
        assert frozen
        assert not any(parameter.requires_grad for parameter in frozen)


def test_casts_leave_scales_alone(llama_folder: Path) -> None:
    model = load_int8(llama_folder)
    layer = model.model.layers[0].mlp.up_proj
    weight, scale = layer.weight.clone(), layer.weight_scale.clone()
    model.to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.weight_scale, scale)


def test_skip_adds_to_the_defaults(tmp_path: Path) -> None:
    # Heads with a bias too, which a list of default names misses.
    model = FAMILIES["bert_classifier"]().model
    model.save_pretrained(tmp_path)
    config = qgemm.QGemmConfig(skip=["bert.encoder.layer.0", re.compile("pooler")])
    names = quantized_names(type(model).from_pretrained(tmp_path, quantization_config=config))
    assert names
    assert all(name.startswith("bert.encoder.layer.1.") for name in names)


def test_heads_with_a_bias_stay_in_float(tmp_path: Path) -> None:
    model = FAMILIES["bert_classifier"]().model
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=qgemm.QGemmConfig())
    assert type(loaded.classifier) is nn.Linear
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)


def test_skipping_one_layer_is_not_skipping_eleven(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=12, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "float")
    model = load(tmp_path / "float", quantization_config=qgemm.QGemmConfig(skip="model.layers.1"))
    model.save_pretrained(tmp_path / "int8")
    for names in (quantized_names(model), quantized_names(load(tmp_path / "int8"))):
        assert {int(name.split(".")[2]) for name in names} == set(range(12)) - {1}


def test_a_pattern_that_matches_nothing(llama_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'model.layers.9' matches no linear layer"):
        load(llama_folder, quantization_config=qgemm.QGemmConfig(skip="model.layers.9"))


def test_the_folder_says_how_it_is_quantized(llama_folder: Path, tmp_path: Path) -> None:
    model = load(llama_folder, quantization_config=qgemm.QGemmConfig(skip="*.o_proj"))
    model.save_pretrained(tmp_path / "int8")
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        assert_same(load_int8(tmp_path / "int8"), model)


def test_what_transformers_looks_for_after_an_in_place_swap(llama_folder: Path) -> None:
    model = qgemm.quantize_model(load(llama_folder))
    assert isinstance(model.hf_quantizer, QGemmQuantizer)
    assert model.hf_quantizer.pre_quantized
    assert model.hf_quantizer.is_serializable()
    assert model.hf_quantizer.is_compileable
    assert model.quantization_method == "qgemm"
    assert model.config.quantization_config.to_dict()["layers"].keys() == quantized_names(model)
    model.half()  # stays possible


def test_a_float_model_from_the_same_config(tmp_path: Path) -> None:
    model = FAMILIES["llama"]().model
    config = model.config
    qgemm.quantize_model(model)
    parts = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    assert parts == {id(model.config)}
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert not quantized_names(load(tmp_path))


def run_python(code: str, *arguments: object) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "import transformers, qgemm",
        "import qgemm, transformers; qgemm.QGemmConfig",
        "import qgemm.integrations.transformers",
    ],
)
def test_a_process_that_only_loads(imports: str, llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    code = f"""
import sys
{imports}
import qgemm
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert sum(isinstance(m, qgemm.QuantLinear) for m in model.modules()) == 14
"""
    run_python(code, tmp_path / "int8")


def test_a_process_without_qgemm_is_warned(llama_folder: Path, tmp_path: Path) -> None:
    # transformers has no way for a package to announce itself; the guide says what to import.
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    code = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    assert "Unknown quantization type, got qgemm" in run_python(code, tmp_path / "int8")


def test_registering_again() -> None:
    # As a notebook's autoreload does. In a process of its own, where nothing else holds the old classes.
    code = """
import importlib, sys
import qgemm
import qgemm.integrations.transformers as module
old = module.QGemmConfig
importlib.reload(module)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
assert qgemm.QGemmConfig is not old
assert AUTO_QUANTIZATION_CONFIG_MAPPING["qgemm"] is qgemm.QGemmConfig
assert AUTO_QUANTIZER_MAPPING["qgemm"] is module.QGemmQuantizer
"""
    run_python(code)


def test_disk_is_refused_where_weights_are_quantized(llama_folder: Path) -> None:
    with pytest.raises(ValueError, match=r'"disk".*quantize and save the model first'):
        load_int8(llama_folder, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder="unused")


def test_quantized_folder_from_disk(llama_folder: Path, tmp_path: Path) -> None:
    model = load_int8(llama_folder)
    model.save_pretrained(tmp_path / "int8")
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    offloaded = load(tmp_path / "int8", device_map=device_map, offload_folder=tmp_path / "offload")
    with torch.no_grad():
        assert torch.equal(offloaded(IDS).logits, model(IDS).logits)
    offloaded.save_pretrained(tmp_path / "again")
    assert_same(load(tmp_path / "again"), model)


# The config.


def test_config_shows_and_copies() -> None:
    config = qgemm.QGemmConfig("int8", skip=["a", re.compile("b+")])
    assert config.to_dict() == {"quant_method": "qgemm", "scheme": "int8", "skip": ["a", "b+"], "input_scales": None}
    assert dict(config) == config.to_dict() == json.loads(config.to_json_string())
    assert '"scheme": "int8"' in repr(config)
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    with pytest.raises(ValueError, match="int9"):
        qgemm.QGemmConfig("int9")


def test_config_of_a_folder(llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    config = AutoConfig.from_pretrained(tmp_path / "int8")
    values = qgemm.QGemmConfig.from_dict(config.quantization_config).to_dict()
    assert values == config.quantization_config
    path = tmp_path / "int8" / "config.json"
    text = json.loads(path.read_text())
    text["quantization_config"]["format_version"] = 99
    path.write_text(json.dumps(text))
    with pytest.raises(qgemm.CheckpointError, match="format_version is 99"):
        load(tmp_path / "int8")


def test_config_that_names_qgemm_but_no_layers(llama_folder: Path) -> None:
    path = llama_folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "qgemm"}}))
    with pytest.raises(qgemm.CheckpointError, match="doesn't say which layers"):
        load(llama_folder)


def test_lazy_name() -> None:
    assert "QGemmConfig" in dir(qgemm)
    with pytest.raises(AttributeError, match="no attribute 'QGemConfig'"):
        qgemm.QGemConfig  # noqa: B018
    code = """
import sys
sys.modules["transformers"] = None
import qgemm
try:
    qgemm.QGemmConfig
except ImportError as error:
    assert "pip install" in str(error)
else:
    raise AssertionError
"""
    run_python(code)


def test_nothing_to_attach() -> None:
    model = FAMILIES["llama"]().model
    attach_quantizer(model)
    assert getattr(model, "hf_quantizer", None) is None
