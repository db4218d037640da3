"""Models that accelerate dispatches, offloads and loads: quantized before that, and after it."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import qgemm
import qgemm.calibration.quantize_block
import qgemm.model.swap
from qgemm import QuantLinear, quantize_model, report, save_quantized

IDS = torch.arange(5)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def offload_to_cpu(model: nn.Module) -> nn.Module:
    return accelerate.cpu_offload(model, execution_device="cpu")


def dispatch_in_part(model: nn.Module) -> nn.Module:
    """As device_map="auto" does with too small a GPU: the last layer is offloaded. Here the GPU is the CPU, too."""
    from accelerate.big_modeling import attach_align_device_hook_on_blocks
    from accelerate.utils import OffloadedWeightsLoader, extract_submodules_state_dict

    names = [name for name, module in model.named_modules() if not list(module.children())]
    last = "model.layers.1."
    state = extract_submodules_state_dict(model.state_dict(), ["model.layers.1"])
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": "cpu", **dict.fromkeys(names, "cpu")},
        offload={name: name.startswith(last) for name in names},
        weights_map=OffloadedWeightsLoader(state_dict=state),
        tied_params_map={},
    )
    return model


def offload_one_by_one(model: nn.Module) -> nn.Module:
    """With a mapping for each module."""
    from accelerate.hooks import attach_align_device_hook

    attach_align_device_hook(model, execution_device="cpu", offload=True, offload_buffers=True)
    return model


OFFLOADS = [offload_to_cpu, dispatch_in_part, offload_one_by_one]


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("build", [llama, mixtral])
def test_a_model_is_quantized_after_it_was_offloaded(
    build: Callable[[], nn.Module], offload: Callable[[nn.Module], nn.Module]
) -> None:
    plain = build()
    model = offload(copy.deepcopy(plain))
    quantize_model(plain)
    quantize_model(model)
    assert report(model) == report(plain)
    layer = model.get_submodule("model.layers.1.self_attn.q_proj")
    assert isinstance(layer, QuantLinear)
    assert layer.weight.device.type == "meta"
    assert torch.equal(logits(model), logits(plain))
    assert layer.weight.device.type == "meta"  # again
    # What is offloaded is what is quantized.
    remove_hook_from_submodules(model)
    for name, value in plain.state_dict().items():
        brought = model.state_dict()[name]
        assert brought.dtype == value.dtype, name
        assert torch.equal(brought, value), name


def offloaded_names(model: nn.Module) -> list[list[str]]:
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    return [list(hook.weights_map) for hook in hooks if getattr(hook, "weights_map", None) is not None]


@pytest.mark.parametrize("offload", OFFLOADS)
def test_what_fails_half_way_leaves_the_float_weights_offloaded(
    offload: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = llama()
    model = offload(copy.deepcopy(plain))
    expected, names, swap = logits(plain), offloaded_names(model), qgemm.model.swap.swap
    for last in (1, 14):
        done: list[str] = []

        def fail(model: nn.Module, layer: Any, *args: Any, done: list[str] = done, last: int = last) -> Any:
            record = swap(model, layer, *args)
            done.append(layer.name)
            if len(done) == last:
                raise KeyboardInterrupt
            return record

        monkeypatch.setattr(qgemm.calibration.quantize_block, "swap", fail)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(model)
        assert torch.equal(logits(model), expected)
        assert offloaded_names(model) == names
    monkeypatch.setattr(qgemm.calibration.quantize_block, "swap", swap)
    quantize_model(model)
    assert torch.equal(logits(model), logits(quantize_model(plain)))


@pytest.mark.parametrize("offload", OFFLOADS)
def test_the_float_weights_are_freed(offload: Callable[[nn.Module], nn.Module]) -> None:
    model = offload(llama())
    weights_map = model.get_submodule("model.layers.1.mlp.up_proj")._hf_hook.weights_map
    weight = weakref.ref(weights_map["weight"])
    del weights_map
    assert weight() is not None
    quantize_model(model)
    assert weight() is None


def test_all_names_of_the_mapping_are_up_to_date() -> None:
    # accelerate lists them when it saves a model.
    model = quantize_model(dispatch_in_part(llama()))
    loader = model.model.layers[1].self_attn.q_proj._hf_hook.weights_map.dataset
    prefix = "model.layers.1.self_attn.q_proj."
    assert {name for name in loader if name.startswith(prefix)} == {prefix + "weight", prefix + "weight_scale"}
    assert all(loader[name] is not None for name in loader)


def test_hooks_that_only_place_a_layer_are_kept() -> None:
    # Those of a model that is spread over GPUs.
    model = llama()
    layer = model.model.layers[0].mlp.up_proj
    add_hook_to_module(layer, AlignDevicesHook("cpu", io_same_device=True, skip_keys="x"))
    quantize_model(model)
    hook = model.model.layers[0].mlp.up_proj._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    assert (hook.execution_device, hook.io_same_device, hook.skip_keys, hook.offload) == ("cpu", True, "x", False)
    assert torch.isfinite(logits(model)).all()


def test_a_forward_hook_survives_beside_the_one_of_accelerate() -> None:
    model = offload_to_cpu(llama())
    seen: list[torch.Size] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda layer, args, out: seen.append(out.shape))
    quantize_model(model)
    logits(model)
    assert seen == [torch.Size([1, 5, 48])]


def test_nan_is_found_before_anything_is_swapped() -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = torch.nan
    offload_to_cpu(model)
    with pytest.raises(ValueError, match=r"weight of 'model\.layers\.1\.mlp\.down_proj' holds NaN or Inf"):
        quantize_model(model)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


def test_an_offloaded_model_is_saved_and_loads(tmp_path: Path) -> None:
    model = quantize_model(offload_to_cpu(llama()))
    expected = logits(model)
    model.hf_device_map = {"": "cpu"}  # which dispatch_model sets, and save_pretrained looks at
    with pytest.warns(UserWarning, match="offloaded modules"):
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path)), expected)


def test_weights_on_disk_are_refused(tmp_path: Path) -> None:
    model = accelerate.disk_offload(llama(), tmp_path, execution_device="cpu")
    expected = logits(model)
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn\.q_proj'.* on disk.*quantize_checkpoint"):
        quantize_model(model)
    assert torch.equal(logits(model), expected)


def test_modules_that_are_loaded_as_a_whole_are_refused() -> None:
    model = accelerate.cpu_offload(llama(), execution_device="cpu", preload_module_classes=["LlamaMLP"])
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.gate_proj'.*without preload_module_classes"):
        quantize_model(model)
    quantize_model(model, skip="*.mlp")
    assert torch.isfinite(logits(model)).all()


def test_other_hooks_are_refused() -> None:
    model = llama()
    add_hook_to_module(model.model.layers[0].mlp.up_proj, ModelHook())
    with pytest.raises(ValueError, match=r"would lose hooks .*'model\.layers\.0\.mlp\.up_proj'.*remove_hook_from"):
        quantize_model(model)
    remove_hook_from_submodules(model)
    quantize_model(model)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_quantized_model_is_offloaded(where: str, tmp_path: Path) -> None:
    model = quantize_model(mixtral())
    expected = logits(model)
    if where == "cpu":
        offload_to_cpu(model)
    else:
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
    assert torch.equal(logits(model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_quantized_checkpoint_is_dispatched_into_an_empty_model(where: str, tmp_path: Path) -> None:
    model = quantize_model(mixtral())
    save_quantized(model, tmp_path / "int8", max_shard_size="20KB")
    with accelerate.init_empty_weights():
        empty = quantize_model(mixtral())
    others = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    device_map = {**dict.fromkeys(others, "cpu"), "model.layers.1": where}
    loaded = accelerate.load_checkpoint_and_dispatch(
        empty, tmp_path / "int8", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("build", [llama, mixtral])
def test_an_offloaded_model_is_dequantized_after_it_was_brought_back(build: Callable[[], Any], tmp_path: Path) -> None:
    model: Any = quantize_model(build())
    expected = logits(copy.deepcopy(model).dequantize())
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.\S+ is offloaded.*remove_hook_from_submodules\(model\)"):
        model.dequantize()
    remove_hook_from_submodules(model)
    assert torch.equal(logits(model.dequantize()), expected)


def test_hooks_that_only_place_a_layer_survive_dequantize() -> None:
    model: Any = quantize_model(llama())
    add_hook_to_module(model.model.layers[0].mlp.up_proj, AlignDevicesHook("cpu", io_same_device=True))
    model.dequantize()
    assert model.model.layers[0].mlp.up_proj._hf_hook.io_same_device


@pytest.mark.slow(quick=["int8"])
@pytest.mark.parametrize("scheme", ["int8", "int8-hadamard", "int4-32", "fp8"])
def test_from_pretrained_with_a_device_map_that_offloads(scheme: str, tmp_path: Path) -> None:
    model = quantize_model(llama(), scheme)
    save_quantized(model, tmp_path / "quantized", max_shard_size="20KB")
    names = {name.rpartition(".")[0] for name, _ in model.named_parameters()} | {"model.rotary_emb"}
    device_map = {name: "disk" if "layers.1." in name else "cpu" for name in names}
    loaded: Any = LlamaForCausalLM.from_pretrained(
        tmp_path / "quantized", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert loaded.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    assert torch.equal(logits(loaded), logits(model))
    # What lies on a disk is saved with the rest, and a layer there isn't fused.
    with pytest.warns(UserWarning, match="offloaded modules"):
        loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "again")), logits(model))
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    qgemm.fast_generate(qgemm.fuse(loaded))
    with pytest.warns(UserWarning, match=r"transformers' own loop, .* spread over several devices"):
        assert torch.equal(loaded.generate(IDS, max_new_tokens=4, do_sample=False), tokens)


def t5() -> T5ForConditionalGeneration:
    sizes = {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=16)).eval()


def every_second_block_on(where: str, model: nn.Module) -> dict[str, str]:
    names = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: where if {"block.1", "h.1"} & set(re.findall(r"\w+\.1", name)) else "cpu" for name in names}


MODELS = [
    (t5, {"input_ids": IDS, "decoder_input_ids": IDS}),  # it asks for a weight's dtype, to cast its input
    (gpt2, {"input_ids": IDS}),
]


@pytest.mark.slow(quick=["int4-t5"])
@pytest.mark.parametrize(("build", "inputs"), MODELS, ids=["t5", "gpt2"])
@pytest.mark.parametrize(
    "scheme", ["int8", "int8-weight", "int4", "int4-int8", "fp8", "fp8-block", "mxfp4", "nvfp4", "nf4"]
)
def test_parts_of_models_that_read_their_weights(
    scheme: str, build: Callable[[], Any], inputs: dict[str, Tensor], tmp_path: Path
) -> None:
    model: Any = quantize_model(build(), scheme)
    model.save_pretrained(tmp_path / "quantized")
    with torch.no_grad():
        expected = model(**inputs).logits
    device_map = every_second_block_on("disk", model)
    assert {"cpu", "disk"} == set(device_map.values())
    # transformers initializes what no file has, which nothing on disk may pass for.
    loaded = type(model).from_pretrained(
        tmp_path / "quantized", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    offloaded = (
        offload_to_cpu(copy.deepcopy(model)),
        accelerate.disk_offload(copy.deepcopy(model), tmp_path / "all", execution_device="cpu"),
        accelerate.dispatch_model(
            copy.deepcopy(model), device_map, main_device="cpu", offload_dir=tmp_path / "dispatched"
        ),
        loaded,
    )
    for each in offloaded:
        with torch.no_grad():
            assert torch.equal(each(**inputs).logits, expected)


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_accelerate_loads_into_a_model_with_values(scheme: str, tmp_path: Path) -> None:
    # It casts what it reads to the dtype of what it replaces.
    model, other = (quantize_model(llama(), scheme) for _ in range(2))
    save_quantized(model, tmp_path)
    accelerate.load_checkpoint_in_model(other, tmp_path, device_map={"": "cpu"})
    assert torch.equal(logits(other), logits(model))
    for name, value in model.state_dict().items():
        assert other.state_dict()[name].dtype == value.dtype, name


def test_a_weight_on_meta_is_no_garbage() -> None:
    # As after a swap that lost a hook.
    layer = qgemm.QuantLinear(32, 16, device="meta")
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        layer(torch.randn(2, 32))
