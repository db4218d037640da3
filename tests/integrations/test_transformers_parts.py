"""Parts of quantized models in transformers: classes that read a part of a folder, and parts that are saved alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint.rewriting import edited
from families import FAMILIES, VOCABULARY
from families.mixtures import MIXTURES
from processes import run_code
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, CLIPVisionConfig, CLIPVisionModel, EncoderDecoderConfig, EncoderDecoderModel

import qgemm
from integrations.folders import assert_same, quantized_names, tensors
from qgemm.checkpoint.refusal import REFUSAL
from qgemm.integrations.transformers.parts import refuse_values
from qgemm.integrations.transformers.renaming import Renaming, check_dtypes


def quantized(family: str, **options: Any) -> Any:
    model: Any = FAMILIES[family]().model
    if family == "clip":
        for part in (model.config.text_config, model.config.vision_config):
            part.projection_dim = model.config.projection_dim  # as in CLIP's own
    return qgemm.quantize_model(model, **options)


def edit_config(folder: Path, *dropped: str, parts: bool = False) -> None:
    """Takes keys out of ``config.json``, or of its parts alone."""
    with edited(folder / "config.json") as config:
        for values in [each for each in config.values() if isinstance(each, dict)] if parts else [config]:
            for key in dropped:
                values.pop(key, None)


def assert_has_values(part: nn.Module, whole: nn.Module, prefix: str) -> None:
    """Every tensor of ``part`` is that of ``whole`` whose name begins with ``prefix``."""
    ours, theirs = tensors(part), tensors(whole)
    assert quantized_names(part) == {
        name.removeprefix(prefix)
        for name in quantized_names(whole)
        if name.removeprefix(prefix) in dict(part.named_modules())
    }
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[prefix + name]), name
        assert tensor.dtype == theirs[prefix + name].dtype


# What each class is called in the whole model.
CLASSES = [
    ("clip", "CLIPVisionModel", "vision_model."),
    ("clip", "CLIPTextModel", "text_model."),
    ("clip", "CLIPVisionModelWithProjection", ""),
    ("clip", "CLIPTextModelWithProjection", ""),
    ("siglip", "SiglipVisionModel", "vision_model."),
    ("siglip", "SiglipTextModel", "text_model."),
]


@pytest.mark.parametrize(("family", "name", "prefix"), CLASSES)
def test_a_class_that_reads_a_part(family: str, name: str, prefix: str, tmp_path: Path) -> None:
    model = quantized(family)
    model.save_pretrained(tmp_path / "theirs")
    qgemm.save_quantized(model, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        part = getattr(transformers, name).from_pretrained(folder)
        assert quantized_names(part)
        assert_has_values(part, model, prefix)
    # And is a quantized model of its own.
    part.save_pretrained(tmp_path / "part")
    assert_same(type(part).from_pretrained(tmp_path / "part"), part)
    assert_same(qgemm.load_quantized(tmp_path / "part"), part)


@pytest.mark.parametrize("scheme", ["fp8", "int4-16", "nvfp4"])
def test_a_part_in_another_scheme(scheme: str, tmp_path: Path) -> None:
    model = quantized("clip", scheme=scheme)
    model.save_pretrained(tmp_path)
    loaded = CLIPVisionModel.from_pretrained(tmp_path)
    with torch.no_grad():
        pixels = FAMILIES["clip"]().inputs["pixel_values"]
        assert torch.equal(loaded(pixels).pooler_output, model.vision_model(pixels).pooler_output)


def test_a_part_that_had_a_class_of_its_own(tmp_path: Path) -> None:
    model = quantized("clip")
    model.config.vision_config.architectures = ["CLIPVisionModel"]
    model.save_pretrained(tmp_path)
    assert_has_values(CLIPVisionModel.from_pretrained(tmp_path), model, "vision_model.")


def test_parts_that_are_for_no_model(tmp_path: Path) -> None:
    # Their config takes no argument that it doesn't know.
    attention = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}
    parts = {"attn_config": attention, "ffn_config": {"ffn_hidden_size": 48, "moe_top_k": 2}}
    config = transformers.DbrxConfig(vocab_size=17, d_model=32, n_heads=2, n_layers=1, max_seq_len=16, **parts)
    model: Any = transformers.DbrxForCausalLM(config).eval()
    with pytest.warns(UserWarning, match="of the bytes"):
        qgemm.quantize_model(model)
    model.save_pretrained(tmp_path)
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_folders_from_before(tmp_path: Path) -> None:
    # Whose parts say nothing.
    model = quantized("clip")
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, "fusion_config", parts=True)
    assert_has_values(CLIPVisionModel.from_pretrained(tmp_path), model, "vision_model.")


def test_a_part_in_a_subfolder_and_converted(tmp_path: Path) -> None:
    model = quantized("clip")
    model.save_pretrained(tmp_path / "inside")
    assert_has_values(CLIPVisionModel.from_pretrained(tmp_path, subfolder="inside"), model, "vision_model.")
    loaded = CLIPVisionModel.from_pretrained(tmp_path / "inside", quantization_config=qgemm.QGemmConfig("int8-weight"))
    assert {m.scheme.name for m in loaded.modules() if isinstance(m, qgemm.nn.QuantLayer)} == {"int8-weight"}


@pytest.mark.filterwarnings("ignore:only .* of the bytes")
@pytest.mark.parametrize(
    ("family", "name", "prefix"),
    [("clip", "CLIPVisionModel", "vision_model."), ("qwen2_5_vl", "Qwen2_5_VLTextModel", "model.language_model.")],
)
def test_a_part_in_float(family: str, name: str, prefix: str, tmp_path: Path) -> None:
    model = quantized(family, skip=f"{prefix}*")
    model.save_pretrained(tmp_path / "whole")
    part = getattr(transformers, name).from_pretrained(tmp_path / "whole")
    assert_has_values(part, model, prefix)
    part.save_pretrained(tmp_path / "part")
    config = json.loads((tmp_path / "part" / "config.json").read_text())
    assert not config.keys() & {"quantization_config", "fusion_config"}
    assert_same(type(part).from_pretrained(tmp_path / "part"), part)


@pytest.mark.filterwarnings("ignore:only .* of the bytes")
@pytest.mark.parametrize(
    ("family", "name", "rest"), [("clip", "vision_model", {"skip": "vision_model"}), ("llama", "model", {})]
)
def test_a_part_in_float_that_is_saved_alone(family: str, name: str, rest: dict[str, Any], tmp_path: Path) -> None:
    rest = rest or {"skip": "model", "include": "lm_head"}
    model: Any = qgemm.quantize_model(FAMILIES[family]().model, **rest)
    part, before = model.get_submodule(name), vars(model.config)["quantization_config"]
    part.save_pretrained(tmp_path / "part")
    config = json.loads((tmp_path / "part" / "config.json").read_text())
    assert not config.keys() & {"quantization_config", "fusion_config"}
    assert_same(type(part).from_pretrained(tmp_path / "part"), part)
    assert vars(model.config)["quantization_config"] is before
    model.save_pretrained(tmp_path / "whole")
    assert_same(type(model).from_pretrained(tmp_path / "whole"), model)


def test_a_part_in_float_with_ties(tmp_path: Path) -> None:
    # Files hold one of its embeddings.
    model = quantized("t5", skip="encoder.*")
    model.save_pretrained(tmp_path)
    part = transformers.T5EncoderModel.from_pretrained(tmp_path)
    assert not quantized_names(part)
    assert_has_values(part, model, "")


def test_a_base_model_of_a_part(tmp_path: Path) -> None:
    # transformers looks for names of the original files, which quantized ones don't have.
    model = quantized("qwen2_5_vl")
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert_has_values(base, model, "model.")
    part, found = transformers.Qwen2_5_VLTextModel.from_pretrained(tmp_path, output_loading_info=True)
    assert_has_values(part, model, "model.language_model.")
    assert not found["missing_keys"]
    assert not [name for name in found["unexpected_keys"] if name.endswith("inv_freq") and "visual" not in name]


def test_a_part_that_has_nothing_in_the_folder(tmp_path: Path) -> None:
    quantized("llava").save_pretrained(tmp_path)
    with pytest.raises(qgemm.CheckpointError, match="BertModel has none of the quantized layers"):
        transformers.BertModel.from_pretrained(tmp_path)


def test_a_config_that_says_nothing(tmp_path: Path) -> None:
    model = quantized("clip")
    model.save_pretrained(tmp_path / "int8")
    whole = transformers.CLIPConfig.from_pretrained(tmp_path / "int8")
    for config in (whole.vision_config, CLIPVisionConfig.from_dict(model.config.vision_config.to_dict())):
        vars(config).pop("fusion_config", None)
        for options in ({}, {"quantization_config": qgemm.QGemmConfig()}):
            with pytest.raises(qgemm.CheckpointError, match=r"weight holds values of a quantized layer.*config="):
                CLIPVisionModel.from_pretrained(tmp_path / "int8", config=config, **options)
    part = CLIPVisionModel.from_pretrained(
        tmp_path / "int8", config=CLIPVisionConfig.from_pretrained(tmp_path / "int8")
    )
    assert_has_values(part, model, "vision_model.")


def test_a_state_dict_without_its_config() -> None:
    part = quantized("clip").vision_model
    config = CLIPVisionConfig(**FAMILIES["clip"]().model.config.vision_config.to_dict())
    with pytest.raises(qgemm.CheckpointError, match="weight holds values of a quantized layer"):
        CLIPVisionModel.from_pretrained(None, config=config, state_dict=part.state_dict())


def test_a_damaged_float_file(tmp_path: Path) -> None:
    # Of which qgemm says nothing.
    model: Any = FAMILIES["clip"]().model
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(SafetensorError):
        type(model).from_pretrained(tmp_path)


class _OfTwo(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second


def test_names_in_files() -> None:
    part = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    own = part.state_dict()
    assert Renaming.find(part, own) == Renaming()
    assert Renaming.find(part, _OfTwo(part, nn.Linear(4, 4)).state_dict()) == Renaming(removed="first.")
    assert Renaming.find(part, _OfTwo(part, part).state_dict()) == Renaming()  # which of the two, nobody knows
    assert Renaming.find(part, [*own, *_OfTwo(part, nn.Linear(4, 4)).state_dict()]) == Renaming()
    whole = _OfTwo(part, nn.Linear(4, 4))
    added = Renaming.find(whole, own)
    assert added == Renaming(added="first.")
    assert (added.name_in(whole, "0.weight"), added.name_in(whole, "second.bias")) == ("first.0.weight", "second.bias")
    assert added.name_in(whole, "third.bias") is None
    assert [each.rename_source_key("0.weight")[0] for each in added.conversions()] == ["first.0.weight"]


@pytest.mark.parametrize("name", ["weight", "0.weight"])
def test_what_is_no_quantized_value(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    check_dtypes(model, {name: torch.int8})
    check_dtypes(model, {name: torch.float32, f"{name}_scale": torch.float32})
    model[0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    check_dtypes(model, {name: torch.int8, f"{name}_scale": torch.float32})


def test_files_for_others_without_their_config(tmp_path: Path) -> None:
    qgemm.save_quantized(quantized("clip"), tmp_path, format="compressed-tensors")
    with pytest.raises(qgemm.CheckpointError, match="weight holds values of a quantized layer"):
        CLIPVisionModel.from_pretrained(tmp_path)


def _of_two_berts() -> Any:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    encoder = BertConfig(**sizes, num_attention_heads=2)
    decoder = BertConfig(**sizes, num_attention_heads=2, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return qgemm.quantize_model(EncoderDecoderModel(config).eval())


PARTS = [
    ("clip", "vision_model"),
    ("clip", "text_model"),
    ("llava", "model.language_model"),
    ("llava", "model"),
    ("qwen2_5_vl", "model.language_model"),
    ("llama", "model"),
    ("t5", "encoder"),
    ("bert and bert", "encoder"),
]


@pytest.mark.filterwarnings("ignore:T5Stack was saved")  # which transformers doesn't export
@pytest.mark.parametrize(("family", "name"), PARTS)
def test_a_part_that_is_saved_alone(family: str, name: str, tmp_path: Path) -> None:
    model = _of_two_berts() if family == "bert and bert" else quantized(family)
    part = model.get_submodule(name)
    before = model.config.to_dict()
    part.save_pretrained(tmp_path / "theirs")
    qgemm.save_quantized(part, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        assert_same(type(part).from_pretrained(folder), part)
    # The whole is as before.
    for key in ("quantization_config", "fusion_config"):
        assert model.config.to_dict()[key] == before[key]
    assert not hasattr(part, "hf_quantizer")
    model.save_pretrained(tmp_path / "whole")
    assert_same(type(model).from_pretrained(tmp_path / "whole"), model)


def test_a_part_that_was_saved_before(tmp_path: Path) -> None:
    # By a version that stored its values and no word of them.
    part = quantized("clip").vision_model
    part.save_pretrained(tmp_path)
    edit_config(tmp_path, "quantization_config", "fusion_config")
    save_file(part.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(qgemm.CheckpointError, match=r"weight holds values of a quantized layer"):
        CLIPVisionModel.from_pretrained(tmp_path)


def test_a_model_around_a_quantized_part(tmp_path: Path) -> None:
    model: Any = FAMILIES["clip"]().model
    qgemm.quantize_model(model.vision_model)
    model.save_pretrained(tmp_path / "theirs")
    qgemm.save_quantized(model, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        config = json.loads((folder / "config.json").read_text())
        assert "quantization_config" not in config["vision_config"]  # whose names are the part's
        assert_same(type(model).from_pretrained(folder), model)
        assert_same(qgemm.load_quantized(folder), model)
    assert not hasattr(model.config, "quantization_config")
    model.vision_model.save_pretrained(tmp_path / "part")
    assert_same(CLIPVisionModel.from_pretrained(tmp_path / "part"), model.vision_model)


def test_a_model_around_a_quantized_part_is_dequantized(tmp_path: Path) -> None:
    model: Any = FAMILIES["clip"]().model
    qgemm.quantize_model(model.vision_model)
    model.dequantize()
    assert not quantized_names(model)
    for saved in (model, model.vision_model):
        saved.save_pretrained(tmp_path)
        assert "quantization_config" not in (tmp_path / "config.json").read_text()
        assert_same(type(saved).from_pretrained(tmp_path), saved)
    with pytest.raises(ValueError, match="first quantize"):
        model.dequantize()


@pytest.mark.parametrize(("family", "name"), [("clip", "vision_model"), ("llama", "model")])
def test_a_part_of_a_quantized_model_is_dequantized(family: str, name: str, tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(FAMILIES[family]().model, include="lm_head" if family == "llama" else None)
    part = model.get_submodule(name)
    part.dequantize()
    assert quantized_names(model)
    assert not quantized_names(part)
    model.save_pretrained(tmp_path / "whole")
    assert_same(type(model).from_pretrained(tmp_path / "whole"), model)
    part.save_pretrained(tmp_path / "part")
    assert_same(type(part).from_pretrained(tmp_path / "part"), part)


def test_a_model_of_two_quantized_ones(tmp_path: Path) -> None:
    # transformers takes their configs for its own.
    bert = _of_two_berts().encoder
    bert.save_pretrained(tmp_path / "bert")
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "bert", tmp_path / "bert")
    assert len(quantized_names(model)) > len(quantized_names(bert))
    model.save_pretrained(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert ["quantization_config" in values for values in (config, config["encoder"])] == [True, False]
    assert_same(EncoderDecoderModel.from_pretrained(tmp_path / "whole"), model)


def test_parts_in_files(tmp_path: Path) -> None:
    model = quantized("clip")
    model.save_pretrained(tmp_path / "theirs")
    qgemm.save_quantized(model, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        config = json.loads((folder / "config.json").read_text())
        assert [config[part]["fusion_config"] for part in ("text_config", "vision_config")] == [{REFUSAL: True}] * 2
        assert "quantization_config" not in config["vision_config"]
    qgemm.save_quantized(model, tmp_path / "for others", format="compressed-tensors")
    assert "qgemm" not in (tmp_path / "for others" / "config.json").read_text()
    model.dequantize()
    assert "qgemm" not in model.config.to_json_string()


WITHOUT_QGEMM = """
import sys
from transformers import CLIPVisionModel
assert "qgemm" not in sys.modules
for folder in sys.argv[1:]:
    try:
        CLIPVisionModel.from_pretrained(folder)
    except ValueError as error:
        assert "qgemm, which must be imported before this checkpoint is loaded" in str(error), error
    else:
        raise AssertionError(f"{folder} was loaded")
"""


@pytest.mark.slow
def test_a_process_without_qgemm_is_refused(tmp_path: Path) -> None:
    model = quantized("clip")
    folders = [tmp_path / name for name in ("theirs", "ours", "part")]
    model.save_pretrained(folders[0])
    qgemm.save_quantized(model, folders[1])
    model.vision_model.save_pretrained(folders[2])
    run_code(WITHOUT_QGEMM, *folders, transformers=True)


WITHOUT_NAMES = """
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
del PreTrainedModel._load_pretrained_model, PreTrainedModel.save_pretrained, PreTrainedConfig.get_config_dict
del PreTrainedModel.resize_token_embeddings
del AutoHfQuantizer.merge_quantization_configs, AutoHfQuantizer.supports_quant_method
import qgemm
assert "qgemm" in AUTO_QUANTIZER_MAPPING
"""


@pytest.mark.parametrize(("size", "entries"), [({"new_num_tokens": 120}, 120), ({"pad_to_multiple_of": 64}, 128)])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_quantized_head_is_not_resized(scheme: str, size: dict[str, int], entries: int) -> None:
    example = FAMILIES["llama"]()
    model: Any = qgemm.quantize_model(example.model, scheme, include="lm_head")
    before = example.output()
    with pytest.raises(ValueError, match=r"lm_head is quantized .*model\.set_output_embeddings\(.*\.dequantize\(\)\)"):
        model.resize_token_embeddings(**size)
    model.resize_token_embeddings()
    model.resize_token_embeddings(VOCABULARY)  # as scripts do whether they add tokens or not
    assert torch.equal(example.output(), before)
    model.set_output_embeddings(model.lm_head.dequantize())
    model.resize_token_embeddings(**size)
    assert example.output().shape[-1] == entries


@pytest.mark.slow
def test_versions_without_what_is_wrapped() -> None:
    run_code(WITHOUT_NAMES, transformers=True)


def test_versions_that_load_with_other_arguments() -> None:
    assert refuse_values(lambda model, config: (model, config))(1, config=2) == (1, 2)
    assert refuse_values(lambda model, load_config: (model, load_config))(1, 2) == (1, 2)


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-asymmetric", "mxfp4", "int8-static-asymmetric"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_parameters_are_counted_as_those_of_the_float_model(family: str, scheme: str) -> None:
    example = {**FAMILIES, **MIXTURES}[family]()
    model: Any = example.model
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    choices: list[dict[str, Any]] = [{}, {"only_trainable": True}, {"exclude_embeddings": True}]
    wanted = [model.num_parameters(**options) for options in choices]
    calibration = [example.inputs] if scheme == "int8-static-asymmetric" else None
    qgemm.quantize_model(model, scheme, calibration=calibration)
    assert [model.num_parameters(**options) for options in choices] == wanted
    if family == "llama":
        layers = model.model.layers
        layers[1].self_attn.q_proj = layers[0].self_attn.q_proj
        own = layers[0].self_attn.q_proj
        assert model.num_parameters(True) == wanted[1]
        assert model.num_parameters(False) == wanted[0] - own.in_features * own.out_features
