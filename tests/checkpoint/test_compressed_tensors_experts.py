"""Checkpoints of compressed-tensors with a linear layer for each expert, which is how its users publish mixtures."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families.example import Example
from families.mixtures import MIXTURES
from integrations.folders import assert_same
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import qgemm
from checkpoint.foreign import edit_quantization, edit_tensors, needs_the_library, relative, same_tensors
from qgemm import CheckpointError, QuantExperts
from qgemm.checkpoint import compressed_tensors_writer, model_names
from qgemm.nn.float_experts import describe_experts

# The names in files of the gate, up and down layers of an expert, and of what is around it.
QWEN = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")
FAMILIES = {"qwen3_moe": QWEN, "mixtral": MIXTRAL, "deepseek_v3": QWEN, "gpt_oss": QWEN, "nemotron_h": QWEN}


def write(model: Any, folder: Path, family: str) -> None:
    """Writes a quantized model as vLLM reads it: int8 weights of single experts, scales ``[N, 1]`` in bfloat16."""
    gate, up, down = FAMILIES[family]
    tensors = {}
    for name, module in model.named_modules():
        held = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        own = {
            f"{name}.{leaf}": t.detach() for leaf, t in held.items() if leaf not in module._non_persistent_buffers_set
        }
        if not isinstance(module, QuantExperts):
            tensors |= {key: t[:, None] if key.endswith("weight_scale") else t for key, t in own.items()}
            continue
        halves = (gate, up) if module.activation.gated else (up,)
        for expert in range(module.num_experts):
            for ours, leaves in (("gate_up_proj", halves), ("down_proj", (down,))):
                for suffix, stored in (("", "weight"), ("_scale", "weight_scale"), ("_bias", "bias")):
                    if f"{name}.{ours}{suffix}" in own:
                        for leaf, part in zip(
                            leaves, own[f"{name}.{ours}{suffix}"][expert].chunk(len(leaves)), strict=True
                        ):
                            shaped = part[:, None] if stored == "weight_scale" else part
                            tensors[f"{name}.{expert}.{leaf}.{stored}"] = shaped
    if family == "mixtral":
        # As the model was first published.
        tensors = {re.sub(r"\.mlp\.", ".block_sparse_moe.", name): t for name, t in tensors.items()}
    folder.mkdir()
    save_file(
        {name: t.clone().contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads(model.config.to_json_string(use_diff=False))
    linear = {n: m for n, m in model.named_modules() if isinstance(m, qgemm.QuantLinear)}
    config["quantization_config"] = compressed_tensors_writer.quantization_config(model, linear)  # type: ignore[arg-type]
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_put_together(family: str, tmp_path: Path) -> None:
    example = MIXTURES[family]()
    model: Any = qgemm.quantize_model(example.model)
    write(model, tmp_path / "foreign", family)
    loaded = qgemm.load_quantized(tmp_path / "foreign")
    assert_same(loaded, model)
    assert torch.equal(Example(loaded, example.inputs).output(), example.output())
    # And from here on it is one of ours.
    qgemm.save_quantized(loaded, tmp_path / "ours")
    assert_same(qgemm.load_quantized(tmp_path / "ours"), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_written_as_a_layer_each(family: str, tmp_path: Path) -> None:
    example = MIXTURES[family]()
    model: Any = qgemm.quantize_model(example.model)
    qgemm.save_quantized(model, tmp_path / "ours", format="compressed-tensors")
    write(model, tmp_path / "theirs", family)
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    if family == "mixtral":
        theirs = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in theirs.items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    loaded = qgemm.load_quantized(tmp_path / "ours")
    assert_same(loaded, model)
    assert torch.equal(Example(loaded, example.inputs).output(), example.output())


@pytest.mark.parametrize(
    ("family", "reads"), [("qwen3_moe", True), ("mixtral", True), ("gpt_oss", False), ("llama4", False)]
)
@pytest.mark.parametrize("format", ["compressed-tensors", "gptq"])
def test_experts_that_transformers_would_make_up(family: str, reads: bool, format: str, tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(MIXTURES[family]().model, "int4-32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qgemm.save_quantized(model, tmp_path, format=format)
    messages = [str(warning.message) for warning in caught if "fill experts with random" in str(warning.message)]
    assert len(messages) == (0 if reads else 1)
    assert reads or type(model).__name__ in messages[0]


@pytest.mark.parametrize("scheme", ["int4-32", "int4-32-asymmetric", "int8-weight", "mxfp4", "fp8"])
def test_experts_of_other_schemes(scheme: str, tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(MIXTURES["qwen3_moe"]().model, scheme)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    assert "model.layers.1.mlp.experts.2.up_proj.weight_scale" in load_file(tmp_path / "model.safetensors")
    assert_same(qgemm.load_quantized(tmp_path), model)


def test_experts_whose_blocks_hold_gates_and_ups(tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(MIXTURES["qwen3_moe"]().model, "fp8-block")
    with pytest.raises(ValueError, match="has blocks of 128 rows that hold both gates and ups, of 64 rows each"):
        qgemm.save_quantized(model, tmp_path, format="compressed-tensors")


def test_experts_beside_layers_of_another_scheme(tmp_path: Path) -> None:
    schemes = {"*.experts": "int8", "*": "fp8"}
    model: Any = qgemm.quantize_model(MIXTURES["qwen3_moe"]().model, schemes)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    experts = next(group for group in config["config_groups"].values() if group["format"] == "int-quantized")
    assert experts["targets"][0] == r"re:model\.layers\.0\.mlp\.experts\.\d+\."
    assert re.match(experts["targets"][0][3:], "model.layers.0.mlp.experts.11.up_proj")
    assert_same(qgemm.load_quantized(tmp_path), model)


@pytest.mark.parametrize(("experts", "others"), [("fp8-weight", "fp8"), ("int4-32-asymmetric", "int4-32")])
def test_experts_that_fit_the_groups_of_other_layers_too(experts: str, others: str, tmp_path: Path) -> None:
    # Their tensors are alike: which group they are of, its targets say.
    schemes = {"model.layers.0.mlp.experts": experts, "*": others}
    model: Any = qgemm.quantize_model(MIXTURES["mixtral"]().model, schemes)
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    assert_same(qgemm.load_quantized(tmp_path), model)
    edit_quantization(
        tmp_path,
        lambda q: [group.update(targets=["re:.*experts", "re:.*attn"]) for group in q["config_groups"].values()],
    )
    with pytest.raises(CheckpointError, match=r"fits group_\d and group_\d alike, and qgemm evaluates no regular expr"):
        qgemm.load_quantized(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_the_names_are_those_that_transformers_splits_experts_into(family: str, tmp_path: Path) -> None:
    # So that gates aren't taken for ups in the tests above.
    example = MIXTURES[family]()
    example.model.save_pretrained(tmp_path / "float")  # type: ignore[operator]
    floats = load_file(tmp_path / "float" / "model.safetensors")
    write(qgemm.quantize_model(example.model), tmp_path / "foreign", family)
    stored = load_file(tmp_path / "foreign" / "model.safetensors")
    assert {name for name in stored if not name.endswith("_scale")} == set(floats)
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            dequantized = tensor * stored[f"{name}_scale"]
            assert (dequantized - floats[name]).norm() < 0.01 * floats[name].norm(), name


EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def with_float_expert(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{EXPERT}.weight_scale"]
    tensors[f"{EXPERT}.weight"] = tensors[f"{EXPERT}.weight"].float()


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (without(f"{EXPERT}.weight"), rf"{EXPERT}\.weight is missing; it must be torch.int8"),
        (with_float_expert, rf"lacks {EXPERT} quantized: all experts of a layer must be, or none"),
        (replaced(f"{EXPERT}.weight", lambda t: t[:, :-1]), rf"{EXPERT}\.weight has shape \[64, 63\]; the model's is"),
        (replaced(f"{EXPERT}.weight_scale", lambda t: t / 0), rf"{EXPERT}\.weight_scale holds NaN, Inf or a neg"),
        (
            lambda tensors: tensors.update({EXPERT.replace(".2.", ".8.") + ".weight": torch.zeros(2, 2)}),
            r"holds tensors that the model doesn't have: .*experts\.8\.up_proj\.weight",
        ),
    ],
)
def test_what_is_refused(edit: Any, problem: str, tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(MIXTURES["qwen3_moe"]().model)
    write(model, tmp_path / "foreign", "qwen3_moe")
    edit_tensors(tmp_path / "foreign", edit)
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(tmp_path / "foreign")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_that_stay_in_float(family: str, tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(MIXTURES[family]().model)
    write(model, tmp_path / "foreign", family)
    first = re.compile(r"layers\.0\..*experts\.\d+\.(\w+)\.weight$")

    def restore(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if first.search(name)]:
            tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale").float()

    edit_tensors(tmp_path / "foreign", restore)
    loaded: Any = qgemm.load_quantized(tmp_path / "foreign")
    path = "model.layers.0.mlp.experts"
    for name, wanted in model.get_submodule(path).dequantize(torch.float32).items():
        assert torch.equal(loaded.get_parameter(f"{path}.{name}"), wanted)
    assert isinstance(loaded.get_submodule("model.layers.1.mlp.experts"), QuantExperts)
    config = qgemm.QGemmConfig()
    assert same_tensors(loaded, type(loaded).from_pretrained(tmp_path / "foreign", quantization_config=config))
    # Not all of them.
    edit_tensors(tmp_path / "foreign", lambda tensors: tensors.pop(next(filter(first.search, tensors))))
    with pytest.raises(CheckpointError, match=r"tensors that the model doesn't have: .*experts"):
        qgemm.load_quantized(tmp_path / "foreign")


def test_static_experts_are_refused(tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(MIXTURES["qwen3_moe"]().model)
    write(model, tmp_path / "foreign", "qwen3_moe")
    group = {"strategy": "tensor", "dynamic": False}
    edit_quantization(tmp_path / "foreign", lambda q: q["config_groups"]["group_0"]["input_activations"].update(group))
    edit_tensors(
        tmp_path / "foreign",
        lambda tensors: tensors.update(
            {name.replace("weight_scale", "input_scale"): torch.ones(1) for name in tensors if "weight_scale" in name}
        ),
    )
    with pytest.raises(
        CheckpointError, match=r"0\.mlp\.experts has static activations, which qgemm doesn't compute .* scheme='int8'"
    ):
        qgemm.load_quantized(tmp_path / "foreign")
    assert_same(qgemm.load_quantized(tmp_path / "foreign", scheme="int8"), model)


def test_a_global_scale_of_gates_and_ups(tmp_path: Path) -> None:
    example = MIXTURES["qwen3_moe"]()
    model: Any = qgemm.quantize_model(example.model, "nvfp4")
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    loaded = qgemm.load_quantized(tmp_path)
    assert_same(loaded, model)
    assert torch.equal(Example(loaded, example.inputs).output(), example.output())
    edit_tensors(tmp_path, replaced(f"{EXPERT}.weight_global_scale", lambda t: t * 2))
    gate = EXPERT.replace("up_proj", "gate_proj")
    with pytest.raises(
        CheckpointError, match=rf"{EXPERT}\.weight_global_scale differs from {gate}\.weight_global_scale.*scheme='int8'"
    ):
        qgemm.load_quantized(tmp_path)
    qgemm.load_quantized(tmp_path, scheme="int8")


def test_global_scales_of_all_layers_are_read_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each reading looks at every tensor of the files: one for each layer took a minute for the names of a large model.
    model: Any = qgemm.quantize_model(MIXTURES["qwen3_moe"]().model, "nvfp4")
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    reads: list[int] = []
    read = model_names.read_converted

    def counted(*arguments: Any, only: set[str]) -> Any:
        reads.append(len(only))
        return read(*arguments, only=only)

    monkeypatch.setattr(model_names, "read_converted", counted)
    qgemm.load_quantized(tmp_path)
    experts = [module.num_experts for module in model.modules() if isinstance(module, QuantExperts)]
    assert len(experts) > 1
    assert reads == [2 * sum(experts)]


def test_experts_whose_activations_stay_in_float(tmp_path: Path) -> None:
    model: Any = qgemm.quantize_model(MIXTURES["qwen3_moe"]().model, "int4-32")
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    tokens = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    edit_quantization(tmp_path, lambda q: q["config_groups"]["group_0"].update(input_activations=tokens))
    with pytest.warns(UserWarning, match="activations of experts stay in float, where the checkpoint asks for int8"):
        loaded = qgemm.load_quantized(tmp_path)
    assert loaded.model.layers[0].mlp.experts.scheme.name == "int4-32"
    assert loaded.model.layers[0].self_attn.q_proj.scheme.name == "int4-32-int8"
    experts, wanted = loaded.model.layers[0].mlp.experts.state_dict(), model.model.layers[0].mlp.experts.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in experts.items())


# transformers makes these experts of one layer each in bfloat16, and leaves their activations in float.
TRANSFORMERS = {"int4-32": 0.01, "int4-channel": 0.01, "int8-weight": 0.01, "fp8-weight": 0.01, "fp8": 0.1}


@needs_the_library
@pytest.mark.slow(quick=["int4-32"])
@pytest.mark.parametrize("scheme", TRANSFORMERS)
def test_transformers_loads_experts(scheme: str, tmp_path: Path) -> None:
    example = MIXTURES["mixtral"]()
    model: Any = qgemm.quantize_model(example.model, scheme)
    assert {layer.scheme.name for layer in model.modules() if isinstance(layer, QuantExperts)} == {scheme}
    qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert relative(Example(theirs.eval(), example.inputs).output(), example.output()) < TRANSFORMERS[scheme]


@needs_the_library
@pytest.mark.parametrize(("scheme", "is_lost"), [("mxfp4", False), ("nvfp4", True)])
def test_a_scale_that_transformers_leaves_out(scheme: str, is_lost: bool, tmp_path: Path) -> None:
    example = MIXTURES["mixtral"]()
    model: Any = qgemm.quantize_model(example.model.bfloat16(), scheme)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    said = [str(warning.message) for warning in caught if "global scales of nvfp4 experts" in str(warning.message)]
    assert len(said) == is_lost
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    error = relative(Example(theirs, example.inputs).output(), example.output())
    assert error > 0.5 if is_lost else error < 0.05


@needs_the_library
@pytest.mark.parametrize(
    ("first", "others", "is_lost"),
    [("int8-weight", "int4-32", True), ("fp8", "fp8-weight", False), ("int4-32", "int4-32", False)],
)
def test_transformers_reads_all_experts_in_one_scheme(first: str, others: str, is_lost: bool, tmp_path: Path) -> None:
    layers = {"*.0.mlp.experts": first, "*": others}
    model: Any = qgemm.quantize_model(MIXTURES["qwen3_moe"]().model, layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    said = f"layers.0.mlp.experts has '{first}', and model.layers.1.mlp.experts '{others}'"
    assert [said in str(warning.message) for warning in caught] == [True] * is_lost
    assert same_tensors(qgemm.load_quantized(tmp_path), model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[0].mlp.experts.down_proj
    error = relative(theirs.detach(), model.model.layers[0].mlp.experts.dequantize(torch.float32)["down_proj"])
    assert error > 0.5 if is_lost else error < 0.01


@needs_the_library
@pytest.mark.parametrize(("scheme", "is_lost"), [("fp8", False), ("int8", True)])
def test_experts_without_gates_that_transformers_makes_up(scheme: str, is_lost: bool, tmp_path: Path) -> None:
    example = MIXTURES["nemotron_h"]()
    model: Any = qgemm.quantize_model(example.model, scheme)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
    assert ["such as model.layers.1.mixer.experts, with random numbers" in str(each.message) for each in caught] == [
        True
    ] * is_lost
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert bool(info["missing_keys"]) == is_lost


def test_layers_that_transformers_skips_are_left_out(tmp_path: Path) -> None:
    # Those of DeepSeek V3 that predict several tokens: of layer 61, one beyond the model's. Float, int8, and packed.
    model: Any = qgemm.quantize_model(MIXTURES["deepseek_v3"]().model)
    write(model, tmp_path / "foreign", "deepseek_v3")
    more = {
        "enorm.weight": torch.ones(8),
        "eh_proj.weight": torch.ones(8, 16, dtype=torch.int8),
        "eh_proj.weight_scale": torch.ones(8, 1),
        "mlp.experts.0.up_proj.weight": torch.ones(8, 16, dtype=torch.int8),
        "mlp.experts.0.up_proj.weight_scale": torch.ones(8, 1),
    }
    edit_tensors(tmp_path / "foreign", lambda t: t.update({f"model.layers.61.{name}": v for name, v in more.items()}))
    assert_same(qgemm.load_quantized(tmp_path / "foreign"), model)
    edit_tensors(tmp_path / "foreign", lambda t: t.update({"model.layers.60.enorm.weight": torch.ones(8)}))
    with pytest.raises(CheckpointError, match=r"tensors that the model doesn't have: .*layers\.60\.enorm"):
        qgemm.load_quantized(tmp_path / "foreign")


@pytest.mark.parametrize(
    "other", [{"is_transposed": True}, {"is_interleaved": True}, {"parameters": {"down_proj_bias": "down_proj_bias"}}]
)
def test_float_experts_in_a_form_of_their_own_are_not_put_together(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = MIXTURES["qwen3_moe"]().model, "model.layers.0.mlp.experts"
    source = describe_experts(model.get_submodule(path))
    leaves = [f"{each}.{leaf}" for each in range(source.num_experts) for leaf in ("gate_proj", "up_proj", "down_proj")]
    for told, count in ((source, len(leaves)), (replace(source, **other), 0)):
        merged: list[Any] = []
        headers = dict.fromkeys(f"{path}.{leaf}.weight" for leaf in leaves)
        contents: Any = SimpleNamespace(headers=headers, merge=lambda *args, merged=merged: merged.append(args))
        monkeypatch.setattr(model_names, "describe_experts", lambda _, told=told: told)
        model_names.merge_float_experts(contents, model)
        assert len(merged) == count
