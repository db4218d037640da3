"""What is loaded is what was saved: every tensor, dtype, tie and output, bit for bit."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, UNLIKE, Example
from families.mixtures import MIXTURES
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DbrxConfig, DbrxForCausalLM

from checkpoint.models import Net, quantized_net, swap_linears, tiny_llama
from checkpoint.rewriting import edited
from checkpoint.samples import SAMPLES
from qgemm import QuantLinear
from qgemm.checkpoint import CheckpointError, load_quantized, requantize, save_quantized
from qgemm.checkpoint.load import find_matching
from qgemm.checkpoint.pretrained import model_config, parameters_on_meta
from qgemm.model.report import LayerRecord, QuantReport, report
from qgemm.nn import LinearLayer, QuantExperts
from qgemm.quantize import quantize_model
from tests.operators import Operators

IDS = torch.arange(12).reshape(2, 6)


def assert_same_tensors(loaded: nn.Module, saved: nn.Module) -> None:
    for tensors in ("named_parameters", "named_buffers"):
        expected = dict(getattr(saved, tensors)(remove_duplicate=False))
        got = dict(getattr(loaded, tensors)(remove_duplicate=False))
        assert list(got) == list(expected)
        for name, tensor in expected.items():
            assert got[name].dtype == tensor.dtype, name
            assert got[name].device.type == "cpu", name
            assert torch.equal(got[name], tensor), name
    assert list(loaded.state_dict()) == list(saved.state_dict())
    schemes = {name: module.scheme for name, module in saved.named_modules() if isinstance(module, QuantLinear)}
    assert schemes
    for name, scheme in schemes.items():
        layer = loaded.get_submodule(name)
        assert isinstance(layer, QuantLinear)
        assert layer.scheme == scheme
    assert not any(module.training for module in loaded.modules())


@pytest.mark.slow(quick=["llama", "t5", "bert"])
@pytest.mark.parametrize("family", UNLIKE)
def test_transformers_model(family: str, tmp_path: Path) -> None:
    example = FAMILIES[family]()
    quantize_model(example.model)
    save_quantized(example.model, tmp_path)
    loaded = load_quantized(tmp_path)
    assert type(loaded) is type(example.model)
    assert_same_tensors(loaded, example.model)
    assert torch.equal(Example(loaded, example.inputs).output(), example.output())
    assert report(loaded) == report(example.model)
    ours, theirs = loaded.config.to_dict(), example.model.config.to_dict()
    for config in (ours, theirs):
        # What saving adds, as transformers' own save_pretrained does.
        del config["architectures"], config["dtype"], config["_name_or_path"]
    del ours["quantization_config"]["save"]
    assert ours == theirs


def test_a_config_whose_parts_take_few_arguments(tmp_path: Path) -> None:
    parts = {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_top_k": 2},
    }
    config = DbrxConfig(d_model=32, n_heads=4, n_layers=1, max_seq_len=32, vocab_size=97, **parts)
    model = quantize_model(DbrxForCausalLM(config).eval())
    save_quantized(model, tmp_path)
    assert_same_tensors(load_quantized(tmp_path), model)
    # A folder of the machine that saved it.
    assert "_name_or_path" not in (tmp_path / "config.json").read_text()


def test_a_model_type_whose_class_is_another_types(tmp_path: Path) -> None:
    example = FAMILIES["gpt2"]()
    quantize_model(example.model)
    save_quantized(example.model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"model_type": "gpt2"', '"model_type": "gpt-sw3"'))
    assert_same_tensors(load_quantized(tmp_path), example.model)


@pytest.mark.skipif(not hasattr(transformers, "ExaoneConfig"), reason="transformers has it from 5.24 on")
def test_a_config_of_a_class_of_its_own(tmp_path: Path) -> None:
    config = transformers.ExaoneConfig(**tiny_llama().config.to_diff_dict())
    model = transformers.LlamaForCausalLM(config)
    quantize_model(model)
    save_quantized(model, tmp_path)
    loaded = load_quantized(tmp_path)
    assert_same_tensors(loaded, model.eval())
    assert type(loaded.config) is transformers.ExaoneConfig


@pytest.mark.parametrize("build", [FAMILIES["gpt2"], FAMILIES["t5"], FAMILIES["whisper"]])
def test_ties_stay_ties_and_are_stored_once(build: Callable[[], Example], tmp_path: Path) -> None:
    model = swap_linears(build().model)
    save_quantized(model, tmp_path)
    loaded = load_quantized(tmp_path)
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    groups = [group for group in names.values() if len(group) > 1]
    assert groups
    in_file = load_file(tmp_path / "model.safetensors")
    for group in groups:
        assert len({id(loaded.get_parameter(name)) for name in group}) == 1
        assert len(group & set(in_file)) == 1


def test_untied_head_stays_untied_where_the_class_would_tie(tmp_path: Path) -> None:
    # A quantized head, or one that was trained apart, must not become the embedding again.
    model = tiny_llama(tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)
    save_quantized(swap_linears(model), tmp_path)
    assert_same_tensors(load_quantized(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    # Cast after it was built, so its rotary frequencies are rounded too: building it anew would not give these.
    model = swap_linears(tiny_llama().to(dtype))
    save_quantized(model, tmp_path)
    loaded = load_quantized(tmp_path)
    assert loaded.dtype == dtype
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert_same_tensors(loaded, model)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    # Code in a model's __init__ may ask for the default dtype, so the class is built under the one that was saved.
    assert find_matching(tmp_path).model.dtype == dtype
    assert torch.get_default_dtype() == torch.float32


def test_a_config_without_dtype(tmp_path: Path) -> None:
    model = FAMILIES["llama"]().model.to(torch.bfloat16)
    save_quantized(quantize_model(model), tmp_path)
    with edited(tmp_path / "config.json") as config:
        del config["dtype"]
    loaded: Any = load_quantized(tmp_path)
    assert loaded.config.dtype == torch.bfloat16
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_config_has_the_dtype_of_the_float_part() -> None:
    model = swap_linears(tiny_llama(tied=False).to(torch.bfloat16))
    # The quantized head comes first now, whose scales are float32 in a model of any dtype.
    model.model = model._modules.pop("model")
    assert model_config(model)["dtype"] == "bfloat16"


def test_mixed_dtypes(tmp_path: Path) -> None:
    model = tiny_llama().to(torch.bfloat16)
    model.model.norm.float()
    save_quantized(swap_linears(model), tmp_path)
    assert_same_tensors(load_quantized(tmp_path), model)


def test_static_scheme(tmp_path: Path) -> None:
    model = swap_linears(tiny_llama(), "int8-static")
    save_quantized(model, tmp_path)
    assert_same_tensors(load_quantized(tmp_path), model)


def test_shards(tmp_path: Path) -> None:
    model = swap_linears(tiny_llama())
    save_quantized(model, tmp_path, max_shard_size=10_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    # What the safetensors library reads there is the model.
    in_files = {}
    for file in files:
        tensors = load_file(file)
        assert {index["weight_map"][name] for name in tensors} == {file.name}
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 10_000
        in_files |= tensors
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in in_files.values())
    for name, tensor in model.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(in_files[name], tensor)
    assert_same_tensors(load_quantized(tmp_path), model)


def test_generation_config(tmp_path: Path) -> None:
    model = swap_linears(tiny_llama())
    model.generation_config.max_new_tokens = 5
    model.generation_config.repetition_penalty = 1.5
    save_quantized(model, tmp_path)
    loaded = load_quantized(tmp_path)
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
    assert torch.equal(loaded.generate(IDS, do_sample=False), model.generate(IDS, do_sample=False))


def test_infinite_config_value(tmp_path: Path) -> None:
    # JSON has no infinity; transformers writes it in a form of its own.
    model = tiny_llama()
    model.config.a_limit = float("inf")
    save_quantized(swap_linears(model), tmp_path)
    assert load_quantized(tmp_path).config.a_limit == float("inf")


def test_report(tmp_path: Path) -> None:
    model = swap_linears(tiny_llama())
    report = QuantReport((LayerRecord("model.layers.0.mlp.up_proj", "Linear", "int8", "", 6144, 1728, 0.004),))
    model._qgemm_report = report
    save_quantized(model, tmp_path)
    first, *others = load_quantized(tmp_path)._qgemm_report.records
    assert (first,) == report.records
    assert len(others) == 13  # which the report didn't know of


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


@pytest.mark.parametrize("given", [Net, Net(), lambda: Net().double().half()])
def test_other_model(given: Any, tmp_path: Path) -> None:
    model = quantized_net()
    save_quantized(model, tmp_path)
    loaded = load_quantized(tmp_path, model=given)
    assert loaded is given or not isinstance(given, nn.Module)
    assert_same_tensors(loaded, model)
    assert torch.equal(loaded(IDS[:, 0]), model(IDS[:, 0]))
    assert loaded.block[0] is loaded.again
    assert loaded.head.weight is loaded.embed.weight
    assert not any(parameter.requires_grad for parameter in loaded.block[0].parameters())
    assert loaded.embed.weight.requires_grad


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_a_model_that_is_quantized_already(scheme: str, tmp_path: Path) -> None:
    model = quantize_model(tiny_llama())
    save_quantized(model, tmp_path)
    given: Any = quantize_model(tiny_llama(), scheme, fuse=True)
    former = weakref.ref(given.model.layers[0].mlp.up_proj)
    loaded = load_quantized(tmp_path, model=given)
    assert_same_tensors(loaded, model)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert report(loaded) == report(model)
    gc.collect()
    assert former() is None, "what was fused keeps it"


def test_experts_that_are_quantized_already(tmp_path: Path) -> None:
    build = MIXTURES["qwen3_moe"]
    save_quantized(quantize_model(build().model), tmp_path)
    with pytest.raises(CheckpointError, match=r"experts, which is a QuantExperts, already in scheme 'int4'"):
        load_quantized(tmp_path, model=quantize_model(build().model, "int4"))


def test_other_model_on_meta(tmp_path: Path) -> None:
    model = quantized_net()
    save_quantized(model, tmp_path)
    # order is neither float nor in state_dict, so it is in no file and only the given model can have it.
    with pytest.raises(CheckpointError, match=r"has on meta: order"):
        load_quantized(tmp_path, model=on_meta())
    given = on_meta()
    given.order = torch.arange(15, -1, -1)
    assert_same_tensors(load_quantized(tmp_path, model=given), model)


def test_tensor_attribute_on_meta_is_refused(tmp_path: Path) -> None:
    save_quantized(quantized_net(), tmp_path)
    given = Net()
    given.block.table = torch.empty(3, device="meta")
    with pytest.raises(CheckpointError, match=r"block keeps table on meta"):
        load_quantized(tmp_path, model=given)


def test_only_partly_shared_memory_is_stored_apart(tmp_path: Path) -> None:
    model = nn.Sequential(QuantLinear.from_linear(nn.Linear(4, 4)))
    memory = torch.arange(16.0)
    model.register_buffer("all", memory)
    model.register_buffer("part", memory[4:8])
    model.register_buffer("next_part", memory[8:12])
    model.register_buffer("square", memory.view(4, 4))
    model.register_buffer("transposed", memory.view(4, 4).t())
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("also_empty", torch.empty(3, 0))
    model.register_buffer("number", torch.tensor(True))
    save_quantized(model, tmp_path)
    given = nn.Sequential(nn.Linear(4, 4))
    for name, buffer in model.named_buffers():
        given.register_buffer(name, torch.zeros_like(buffer))
    assert_same_tensors(load_quantized(tmp_path, model=given), model.eval())


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: torch.compile(nn.DataParallel(model))])
def test_a_model_in_a_wrapper_saves_as_itself(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    model = swap_linears(tiny_llama())
    save_quantized(wrap(model), tmp_path)
    assert_same_tensors(load_quantized(tmp_path), model)
    wrapped = wrap(tiny_llama())
    assert load_quantized(tmp_path, model=wrapped) is wrapped
    assert_same_tensors(load_quantized(tmp_path, model=wrap(tiny_llama())), wrap(model))


def test_download_of_the_hub_client_loads(tmp_path: Path, llama_folder: Path) -> None:
    # It keeps files in blobs/ under their hashes, and links to them from snapshots/<revision>/.
    snapshot = tmp_path / "models--x--y" / "snapshots" / "0123abcd"
    blobs = tmp_path / "models--x--y" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(llama_folder.iterdir())):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    assert_same_tensors(load_quantized(snapshot), load_quantized(llama_folder))


def test_an_adapter_beside_the_model_is_told_of(tmp_path: Path, llama_folder: Path) -> None:
    # from_pretrained adds it; load_quantized loads the model alone.
    folder = shutil.copytree(llama_folder, tmp_path / "copy")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"it has an adapter, adapter_config\.json: add it with load_adapter of the"):
        load_quantized(folder)


def test_loaded_model_does_not_depend_on_its_files(llama_folder: Path) -> None:
    loaded = load_quantized(llama_folder)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    for file in llama_folder.glob("*.safetensors"):
        with file.open("r+b") as damaged:
            damaged.write(bytes(os.path.getsize(file)))
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_device(llama_folder: Path, device: torch.device) -> None:
    loaded = load_quantized(llama_folder, device)
    assert {tensor.device for tensor in (*loaded.parameters(), *loaded.buffers())} == {device}
    # Half precision runs the kernels on every device; and what is on a GPU is saved from there.
    loaded.half()
    output = loaded(IDS.to(device)).logits
    save_quantized(loaded, llama_folder, overwrite=True)
    assert torch.equal(load_quantized(llama_folder, device)(IDS.to(device)).logits, output)


def test_device_of_what_no_file_holds(device: torch.device, tmp_path: Path) -> None:
    save_quantized(quantized_net(), tmp_path)
    loaded: Net = load_quantized(tmp_path, device, model=Net)  # of the type that was passed
    assert loaded.order.device == device


def test_a_cache_that_grew(tmp_path: Path) -> None:
    # As position tables do when a longer text comes. state_dict leaves it out, so its size isn't the model's to say.
    def build() -> Net:
        model = Net()
        model.warp = model.warp[None]
        return model

    model = quantized_net()
    model.warp = torch.rand(2, 16)
    save_quantized(model, tmp_path)
    assert_same_tensors(load_quantized(tmp_path, model=build), model)


def test_random_numbers_are_left_alone(llama_folder: Path) -> None:
    before = torch.get_rng_state()
    load_quantized(llama_folder)
    assert torch.equal(torch.get_rng_state(), before)


class FloatShapes(TorchDispatchMode):
    """The shapes of all float tensors that get memory inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.is_floating_point() and each.device.type != "meta":
                self.shapes.add(tuple(each.shape))
        return out


@pytest.mark.parametrize("family", ["llama", "gpt2", "siglip"])  # Linear; Conv1D; nn.MultiheadAttention
def test_float_weights_are_never_made(family: str, tmp_path: Path) -> None:
    model = swap_linears(FAMILIES[family]().model)
    save_quantized(model, tmp_path)
    with FloatShapes() as made:
        load_quantized(tmp_path)
    float_part = {tuple(tensor.shape) for tensor in model.state_dict().values() if tensor.is_floating_point()}
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    weights = {tuple(layer.weight.shape) for layer in layers} | {tuple(layer.weight.shape)[::-1] for layer in layers}
    assert made.shapes & float_part  # it does see the tensors that are read
    assert not made.shapes & (weights - float_part)


@pytest.mark.slow(quick=["gptq"])
@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("sample", ["gptq-4bit-g32-desc-act", "bnb-nf4-double", "mxfp4-gpt-oss"])
def test_float_weights_of_other_libraries_are_never_made(
    sample: str, scheme: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requantize, "_PIECE", 1 << 10)  # a few rows of these small weights, as 2^22 are of large ones
    with FloatShapes() as made:
        model = load_quantized(SAMPLES / sample, scheme=scheme)
    layers = [module for module in model.modules() if isinstance(module, LinearLayer | QuantExperts)]
    assert scheme is None or {layer.scheme.name for layer in layers} == {scheme}
    smallest = min(
        layer.out_features * layer.in_features
        if isinstance(layer, LinearLayer)
        else 2
        * layer.intermediate_size
        * layer.hidden_size  # of one expert; finding out what they are takes floats, too
        for layer in layers
    )
    float_part = {tuple(tensor.shape) for tensor in model.state_dict().values() if tensor.is_floating_point()}
    assert max(math.prod(shape) for shape in made.shapes & float_part) >= smallest  # such as the embedding
    float_part |= {(math.prod(shape),) for shape in float_part}  # as they are read
    assert [shape for shape in made.shapes - float_part if math.prod(shape) >= smallest] == []


def test_weights_that_take_no_memory_are_not_started(tmp_path: Path) -> None:
    save_quantized(swap_linears(FAMILIES["llama"]().model), tmp_path)
    with Operators() as found:
        torch.empty(1).normal_()
        load_quantized(tmp_path)
    assert found.names.count("aten.normal_") == 1


def test_float_weights_of_a_given_function_are_never_made(tmp_path: Path) -> None:
    save_quantized(quantized_net(), tmp_path)
    with FloatShapes() as made:
        load_quantized(tmp_path, model=Net)
    assert (20, 16) in made.shapes
    assert not made.shapes & {(24, 16), (16, 24)}


@pytest.mark.parametrize("start", [torch.empty, torch.zeros, torch.randn])
def test_fused_experts_take_memory_once(start: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    # The experts of one layer are the largest tensors there are; each model starts them in its own way.
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up = nn.Parameter(start(3, 8, 4))
            self.router = nn.Linear(4, 3)

    model = swap_linears(Experts())
    nn.init.normal_(model.gate_up)
    save_quantized(model, tmp_path)
    with parameters_on_meta(), FloatShapes() as made:
        Experts()
    assert (3, 8, 4) not in made.shapes
    assert torch.equal(load_quantized(tmp_path, model=Experts).gate_up, model.gate_up)


def test_one_model_is_built_at_a_time() -> None:
    # What builds one sets the process's default dtype, and a hook of all modules.
    order, inside = [], threading.Event()

    def build() -> None:
        with parameters_on_meta():
            inside.set()
            time.sleep(0.05)
            order.append("first")

    thread = threading.Thread(target=build)
    thread.start()
    assert inside.wait(10)
    with parameters_on_meta():
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
