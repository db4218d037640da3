"""``from_pretrained`` of checkpoints of other libraries, with a ``QGemmConfig``: the model of ``load_quantized``."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.foreign import edit_quantization, edit_tensors, same_tensors
from checkpoint.models import swap_linears, tiny_llama
from checkpoint.rewriting import edited
from checkpoint.samples import IDS, SAMPLES, every_sample, load_sample
from checkpoint.test_bitsandbytes import float_model, write_by_layout
from checkpoint.test_compressed_tensors_experts import write
from checkpoint.test_fp8 import BLOCKS, FBGEMM, in_blocks, transposed, write_experts
from families.example import Example
from families.mixtures import MIXTURES
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import qgemm
from qgemm import CheckpointError, QGemmConfig
from qgemm.calibration import Recipe, SmoothQuant
from qgemm.nn import QuantLayer, WeightOnlyLinear

NAME = "gptq-4bit-g64-asym-desc-act"
# Their config says float16, which transformers makes of everything, and their files hold bfloat16.
OTHER_DTYPE = {"auto-round-asym", "auto-round-gptq"}


def load(folder: Path, config: QGemmConfig | None = None, **options: Any) -> Any:
    config = QGemmConfig() if config is None else config
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(SAMPLES / name, tmp_path / "copy"))


@pytest.mark.parametrize("name", every_sample())
@torch.no_grad()
def test_samples(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"dtype": torch.bfloat16} if name in OTHER_DTYPE else {}
        model, info = load(SAMPLES / name, output_loading_info=True, **options)
        wanted: Any = qgemm.load_quantized(SAMPLES / name)
    assert same_tensors(model, wanted)
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    assert not any(
        parameter.requires_grad
        for module in model.modules()
        if isinstance(module, QuantLayer)
        for parameter in module.parameters()
    )
    notes = [str(each.message) for each in caught if name in str(each.message)]
    assert notes == 2 * notes[: len(notes) // 2]  # as load_quantized warns
    assert not info["missing_keys"]
    for name in ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"):  # adapters may come later
        assert getattr(model, name) == getattr(type(model), name)
    assert not info["unexpected_keys"]


def test_a_folder_of_pickles_alone(copied: Callable[[str], Path]) -> None:
    folder = copied(NAME)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for load_it in (qgemm.load_quantized, load):
        with pytest.raises(CheckpointError, match=r"holds pytorch_model\.bin, a pickle, .*: convert it to safetensors"):
            load_it(folder)
    # What the error says to do.
    save_file(torch.load(folder / "pytorch_model.bin", weights_only=True), folder / "model.safetensors")
    assert same_tensors(qgemm.load_quantized(folder), qgemm.load_quantized(SAMPLES / NAME))


@pytest.mark.parametrize("everywhere", [True, False])
def test_an_index_that_leads_to_another_checkpoint(
    everywhere: bool, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers follows it, and the layers would be those of the other one."""
    folder = copied(NAME)
    other = Path(shutil.copytree(folder, tmp_path / "a"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    names = sorted(tensors)
    away = str(other / "model.safetensors")
    places = {name: away if everywhere or name == names[0] else "model-00001-of-00002.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for load_it in (qgemm.load_quantized, load):
        with pytest.raises(CheckpointError, match=r"files must lie directly in the folder|isn't in the folder .*copy"):
            load_it(folder)


@pytest.mark.parametrize("said", [{}, {"dtype": None}, {"torch_dtype": None}])
@pytest.mark.parametrize("name", every_sample([NAME, "ct-w4a16-g32-asym", "fp8-block128", "bnb-nf4"]))
@pytest.mark.filterwarnings("ignore:.*copy")
def test_a_config_without_dtype(name: str, said: dict[str, None], copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    with edited(folder / "config.json") as config:
        for key in ("dtype", "torch_dtype"):
            config.pop(key, None)
        config.update(said)
    loaded: Any = qgemm.load_quantized(folder)
    if "ue8m0" not in name:  # a dtype that transformers then can't look past
        assert same_tensors(load(folder), loaded)
    with safe_open(min(folder.glob("*.safetensors")), "pt") as file:
        floats = [file.get_tensor(key).dtype for key in file.keys() if file.get_tensor(key).is_floating_point()]  # noqa: SIM118
    assert loaded.config.dtype == next(each for each in floats if each.itemsize > 1)


@pytest.mark.parametrize("name", every_sample([NAME, "mxfp4-gpt-oss", "torchao-fp8wo"]))
@pytest.mark.filterwarnings("ignore:.*tests/data/formats")  # what the test above compares
@torch.no_grad()
def test_samples_in_another_dtype_are_ones_of_qgemm_from_then_on(name: str, tmp_path: Path) -> None:
    # Not load_sample's, where what is restored to float was rounded to the dtype of the file.
    model, wanted = load(SAMPLES / name, dtype=torch.float32), qgemm.load_quantized(SAMPLES / name, dtype=torch.float32)
    assert same_tensors(model, wanted)
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "qgemm"
    assert same_tensors(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), model)


def write_single_experts(model: Any, folder: Path) -> None:
    write(model, folder, "mixtral")


def write_blocks(model: Any, folder: Path) -> None:
    write_experts(model, folder, BLOCKS, in_blocks)


def write_transposed(model: Any, folder: Path) -> None:
    write_experts(model, folder, FBGEMM, transposed)


@pytest.mark.parametrize(
    ("family", "scheme", "write_folder"),
    [
        ("mixtral", "int8", write_single_experts),
        ("qwen3_moe", "fp8-block", write_blocks),
        ("llama4", "fp8", write_transposed),
    ],
)
def test_experts_that_transformers_puts_together_itself(
    family: str, scheme: str, write_folder: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    example = MIXTURES[family]()
    model: Any = qgemm.quantize_model(example.model, scheme)
    write_folder(model, tmp_path / "foreign")
    loaded = load(tmp_path / "foreign", dtype=torch.float32)
    assert same_tensors(loaded, model)
    assert torch.equal(Example(loaded, example.inputs).output(), example.output())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_is_restored_to_float(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Older versions of libraries found a linear layer there, and quantized it like any other.
    folder = tmp_path / "foreign"
    write(qgemm.quantize_model(MIXTURES["qwen3_moe"]().model), folder, "qwen3_moe")
    router = "model.layers.0.mlp.gate.weight"
    shape = load_file(folder / "model.safetensors")[router].shape
    values = torch.randint(-127, 128, shape, dtype=torch.int8)
    scale = torch.rand(shape[0], 1) / 100
    edit_tensors(folder, lambda tensors: tensors.update({router: values, f"{router}_scale": scale}))
    with pytest.warns(UserWarning, match=r"restored to float as they are loaded: model.layers.0.mlp.gate$"):
        model = load(folder, dtype=dtype)
    weight = model.get_parameter(router)
    assert weight.dtype == dtype
    assert torch.equal(weight, (values.float() * scale).to(dtype))
    assert dict(model.get_submodule("model.layers.0.mlp.gate").named_parameters()).keys() == {"weight"}
    if dtype == torch.float32:
        with pytest.warns(UserWarning, match="restored to float"):
            assert same_tensors(model, qgemm.load_quantized(folder))
        monkeypatch.setattr("qgemm.integrations.transformers.foreign.is_cut", lambda model: True)
        refused = pytest.raises(ValueError, match="in one process alone")
        with pytest.warns(UserWarning, match="restored to float"), refused:
            load(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_restored_to_float(tied: bool, tmp_path: Path) -> None:
    qgemm.save_quantized(swap_linears(tiny_llama(tied)), tmp_path, format="compressed-tensors")
    name = "model.embed_tokens.weight"
    values, scale = torch.randint(-127, 128, (97, 32), dtype=torch.int8), torch.rand(97, 1)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: values, f"{name}_scale": scale}))
    with pytest.warns(UserWarning, match=r"restored to float as they are loaded: model.embed_tokens$"):
        model, other = load(tmp_path), qgemm.load_quantized(tmp_path)
    assert torch.equal(model.get_parameter(name), values.float() * scale)
    assert (model.lm_head.weight is model.get_parameter(name)) == tied
    assert same_tensors(model, other)


def test_int8_activations_for_the_same_weights() -> None:
    scheme = "int4-64-asymmetric-ordered-int8"
    model = load(SAMPLES / NAME, QGemmConfig(scheme), dtype=torch.float32)
    assert same_tensors(model, qgemm.load_quantized(SAMPLES / NAME, scheme=scheme).float())
    weights = load_sample(NAME)[0].state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_another_scheme_and_dtype() -> None:
    model = load(SAMPLES / NAME, QGemmConfig("int8"), dtype=torch.bfloat16, device_map="auto")
    assert {module.scheme.name for module in model.modules() if isinstance(module, QuantLayer)} == {"int8"}
    wanted = qgemm.load_quantized(SAMPLES / NAME, scheme="int8").to(torch.bfloat16)
    assert same_tensors(model, wanted.to(model.device))
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 18)


def test_names_that_the_files_have_for_other_shapes(tmp_path: Path) -> None:
    # bitsandbytes' weight is int8 under its own name, and a weight's bias follows the model's dtype.
    write_by_layout(float_model("gpt2"), tmp_path)
    assert same_tensors(load(tmp_path, dtype=torch.float32), qgemm.load_quantized(tmp_path))


@pytest.mark.parametrize("case", ["a file of its own", "a method that transformers doesn't know"])
def test_checkpoints_that_transformers_takes_for_float_ones(case: str, copied: Callable[[str], Path]) -> None:
    name = "gptq-8bit-channel" if case == "a file of its own" else "auto-round-asym"
    folder = copied(name)
    if case == "a file of its own":
        with edited(folder / "config.json") as config:
            del config["quantization_config"]
    else:
        edit_quantization(folder, lambda quantization: quantization.update(quant_method="intel/auto-round"))
    model = load(folder, dtype=torch.float32)
    assert any(isinstance(module, WeightOnlyLinear) for module in model.modules())
    assert same_tensors(model, load_sample(name)[0])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QGemmConfig(skip="*.k_proj"), "skip is for a float model, but the checkpoint is quantized: leave it out"),
        (QGemmConfig({"*.k_proj": None, "*": "int8"}), "scheme names patterns, but the checkpoint is quantized"),
        (QGemmConfig("int8-static", input_scales={"x": 1.0}), "input_scales is for a float model"),
        (QGemmConfig("int8-static"), "scheme is 'int8-static', which needs data"),
        (QGemmConfig(recipe=Recipe([SmoothQuant()]), calibration=[IDS]), "recipe is for a float model"),
    ],
)
def test_what_is_for_float_models(config: QGemmConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(SAMPLES / NAME, config)


@pytest.mark.parametrize("name", ["gptq-4bit-g128-sym", "mxfp4-gpt-oss", "ct-mixed", "bnb-nf4", "awq-gemm-g128"])
def test_the_first_layers_of_a_model(name: str) -> None:
    first = load(SAMPLES / name, num_hidden_layers=1, dtype=torch.float32)
    wanted: Any = qgemm.load_quantized(SAMPLES / name, dtype=torch.float32)
    assert len(wanted.model.layers) == 2
    wanted.model.layers = wanted.model.layers[:1]
    assert same_tensors(first, wanted)


def test_damage_and_another_class_are_refused(copied: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match=r"the model is a LlamaModel: load the class that is named"):
        AutoModel.from_pretrained(SAMPLES / NAME, quantization_config=QGemmConfig())
    folder, name = copied(NAME), "model.layers.1.mlp.up_proj.scales"
    edit_tensors(folder, lambda tensors: tensors[name].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {name} holds NaN"):
        load(folder)
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"{name} is missing"):
        load(folder)
    with pytest.raises(CheckpointError, match=r"lacks tensors of the model: .*model\.layers\.2\."):
        load(SAMPLES / NAME, num_hidden_layers=3)


def test_the_config_of_a_quantized_model_is_passed_again(tmp_path: Path) -> None:
    # transformers expects a dict there, as it stands in files; the config of a model holds an object.
    model = qgemm.quantize_model(tiny_llama(), {"*.mlp.*": "int4", "*": "int8"})
    model.save_pretrained(tmp_path)
    for config in (model.config, AutoModelForCausalLM.from_pretrained(tmp_path).config):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
        assert same_tensors(again, model)
        assert again.config.quantization_config is not config.quantization_config
    tiny_llama().save_pretrained(tmp_path / "float")
    with pytest.raises(CheckpointError, match="these are files of two checkpoints"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "float", config=model.config)


def test_the_config_of_a_model_in_other_files() -> None:
    model: Any = load_sample(NAME)[0]
    empty = copy.deepcopy(model.config)
    empty.quantization_config = QGemmConfig()
    for config in (model.config, empty):
        message = r"is quantized by another library, and .* in config= is qgemm's: take that out of it \(del config"
        for options in ({}, {"quantization_config": QGemmConfig()}):
            with pytest.raises(CheckpointError, match=message):
                AutoModelForCausalLM.from_pretrained(SAMPLES / NAME, config=config, **options)
    del empty.quantization_config
    options = {"quantization_config": QGemmConfig(), "dtype": torch.float32}
    assert same_tensors(AutoModelForCausalLM.from_pretrained(SAMPLES / NAME, config=empty, **options), model)


def test_configs_of_one_class_are_still_compared(tmp_path: Path) -> None:
    from transformers import GPTQConfig

    qgemm.save_quantized(load_sample(NAME)[0], tmp_path)
    with pytest.raises(ValueError, match="quantized with QGemmConfig but you are passing a GPTQConfig"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=GPTQConfig(bits=4))


def test_a_quantized_head_that_the_config_ties_to_the_embedding(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder, layer = copied("gptq-4bit-g128-sym"), "model.layers.0.mlp.gate_proj."
    with edited(folder / "config.json") as config:
        config["tie_word_embeddings"] = True

    def quantize_head(tensors: dict[str, Any]) -> None:
        del tensors["lm_head.weight"]
        own = {name: value for name, value in tensors.items() if name.startswith(layer)}
        tensors.update({name.replace(layer, "lm_head."): value.clone() for name, value in own.items()})

    edit_tensors(folder, quantize_head)
    wanted: Any = qgemm.load_quantized(folder)
    assert isinstance(wanted.lm_head, WeightOnlyLinear)
    assert same_tensors(load(folder), wanted)
    for save in (qgemm.save_quantized, type(wanted).save_pretrained):
        save(wanted, tmp_path / save.__name__)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / save.__name__)
        assert same_tensors(again, wanted)
        assert same_tensors(qgemm.load_quantized(tmp_path / save.__name__), wanted)
        # As a checkpoint says that was saved with the config as it was.
        with edited(tmp_path / save.__name__ / "config.json") as config:
            assert config["tie_word_embeddings"] is False
            config["tie_word_embeddings"] = True
        again = AutoModelForCausalLM.from_pretrained(tmp_path / save.__name__)
        assert same_tensors(again, wanted)
        again.tie_weights()
        assert isinstance(again.lm_head, WeightOnlyLinear)


@pytest.mark.parametrize("offloaded", ["model.layers.1", "model.embed_tokens"])  # a layer, and what is restored
def test_layers_that_device_map_offloads_are_refused(offloaded: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    qgemm.save_quantized(swap_linears(tiny_llama(False)), tmp_path, format="compressed-tensors")
    name = "model.embed_tokens.weight"
    values, scale = torch.randint(-127, 128, (97, 32), dtype=torch.int8), torch.rand(97, 1)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: values, f"{name}_scale": scale}))
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    devices = {part: "disk" if part == offloaded else "cpu" for part in parts}
    message = rf"device_map offloads {offloaded}.*, whose values come from another library's files"
    with pytest.warns(UserWarning, match="restored to float"), pytest.raises(ValueError, match=message):
        load(tmp_path, device_map=devices, offload_folder=tmp_path / "offloaded")
