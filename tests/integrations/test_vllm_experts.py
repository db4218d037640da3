"""Mixtures of experts in vLLM, in every scheme that experts have: the tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import qgemm
from integrations.vllm_engine import NEW, PROMPTS, model, tokens_of_transformers, tokens_of_vllm
from qgemm.kernels import GPT_OSS, GatedActivation
from qgemm.nn import QuantExperts
from qgemm.nn.shard import Shard
from qgemm.scheme import resolve_scheme

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("qwen3_moe", "int8"),
        ("mixtral", "int8"),
        ("qwen3_moe", "fp8"),
        ("qwen3_moe", "fp8-block"),
        ("qwen3_moe", "int8-weight"),
        ("qwen3_moe", "int4"),
        ("mixtral", "int4-32-asymmetric"),
        ("qwen3_moe", "mxfp4"),
        ("qwen3_moe", "nvfp4"),  # whose experts have a global scale each
        # With biases, and an activation of its own.
        ("gpt_oss", "mxfp4"),
        ("gpt_oss", "int8"),
        ("gpt_oss", "int4-32"),
    ],
)
def test_a_mixture_of_experts(family: str, scheme: str, tmp_path: Path) -> None:
    made = qgemm.quantize_model(model(family), scheme, progress=False)
    assert {name for name, module in made.named_modules() if isinstance(module, qgemm.QuantExperts)}
    made.save_pretrained(tmp_path / "mixture")
    assert tokens_of_vllm(tmp_path / "mixture") == tokens_of_transformers(made)


@pytest.mark.parametrize(("family", "scheme"), [("qwen3_moe", "int8"), ("gpt_oss", "mxfp4")])
def test_weights_without_meaning(family: str, scheme: str, tmp_path: Path) -> None:
    """vLLM's dummy weights, for measuring: scales have either sign, and those of one byte are left as they are."""
    qgemm.quantize_model(model(family), scheme, progress=False).save_pretrained(tmp_path / "mixture")
    (tmp_path / "mixture" / "model.safetensors").unlink()
    assert [len(tokens) for tokens in tokens_of_vllm(tmp_path / "mixture", load_format="dummy")] == [NEW] * len(PROMPTS)


def layer_of(tp_rank: int, tp_size: int, has_bias: bool = False, **changes: Any) -> Any:
    """As much of vLLM's fused experts as the method reads, on one of some ranks."""
    layer = nn.Module()
    parallel = SimpleNamespace(tp_size=tp_size, tp_rank=tp_rank)
    config = SimpleNamespace(has_bias=has_bias, moe_parallel_config=parallel)
    values = {"moe_config": config, "expert_map": None, "activation": "silu", "swiglu_limit": None, **changes}
    for name, value in values.items():
        setattr(layer, name, value)
    return layer


def method_of(layer: Any, scheme: str) -> Any:
    """The method of a ``layer``."""
    from qgemm.integrations.vllm.experts import QGemmExpertsMethod

    return QGemmExpertsMethod(resolve_scheme(scheme), "mlp.experts", layer, "mlp.experts")


def assert_same_experts(method: Any, layer: Any, wanted: QuantExperts) -> None:
    """What ``layer`` holds and computes is what ``wanted`` does."""
    method.process_weights_after_loading(layer)
    for name, value in wanted.named_parameters():
        found = getattr(layer, method.names[name])
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8)), name
    x, weights = torch.randn(5, 256), torch.rand(5, 2)
    index = torch.randint(0, 4, (5, 2))
    own = index if layer.expert_map is None else layer.expert_map.long()[index]
    assert torch.equal(method.apply(layer, x, weights, index), wanted._compute(x, own, weights, None))


SCHEMES = (
    "int8",
    "fp8-block",
    "int4-32",
    "int4-channel-asymmetric",
    "int4-32-float-zeros",
    "nvfp4",
    "mxfp8",
    "int4+int8-weight",
)


@pytest.mark.parametrize(
    ("scheme", "has_bias"), [*((scheme, False) for scheme in SCHEMES), ("int8", True), ("mxfp4", True)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_loaded_on_one_of_two_ranks(scheme: str, has_bias: bool, rank: int) -> None:
    """Columns of each expert. The bias of sums is that of one rank."""
    experts = made_experts(scheme, has_bias)
    layer = layer_of(rank, 2, has_bias, activation="swigluoai" if has_bias else "silu")
    method = method_of(layer, scheme)
    method.create_weights(layer, 4, 256, 256, torch.float32)
    for name, value in experts.state_dict().items():
        method.load(layer, name, value)
    own = made_experts(scheme, has_bias)
    own.cut(Shard("column", None, rank, 2))
    assert not has_bias or bool(own.down_proj_bias.any()) == (rank == 0)
    assert_same_experts(method, layer, own)


@pytest.mark.parametrize("slots", [(0, 1, -1, -1), (-1, 0, -1, 1)])
def test_whole_experts_that_are_loaded_on_one_of_two_ranks(slots: tuple[int, ...]) -> None:
    experts, wanted = made_experts("mxfp4", True), QuantExperts(2, 256, 512, GPT_OSS, True, scheme="mxfp4")
    layer = layer_of(0, 1, True, activation="swigluoai", expert_map=torch.tensor(slots, dtype=torch.int32))
    method = method_of(layer, "mxfp4")
    method.create_weights(layer, 2, 256, 512, torch.float32)
    for name, value in experts.state_dict().items():
        method.load(layer, name, value)
        wanted.get_parameter(name).data = torch.stack([value[slots.index(slot)] for slot in range(2)])
    assert_same_experts(method, layer, wanted)


def made_experts(scheme: str, has_bias: bool = False) -> QuantExperts:
    """Four experts of 512 values between their products, with weights of their own scales; as GPT-OSS's with biases."""
    torch.manual_seed(0)
    experts = QuantExperts(4, 256, 512, GPT_OSS if has_bias else None, has_bias, scheme=scheme)
    for name in ("gate_up_proj", "down_proj"):
        if has_bias:
            experts.get_parameter(f"{name}_bias").data.normal_()
        for expert in range(4):
            made = experts.linear_of(name, expert)
            made.take_weight(torch.randn(made.out_features, made.in_features) * (1 + expert))
            for leaf, value in made.named_parameters():
                if leaf != "bias":
                    getattr(experts, name + leaf.removeprefix("weight")).data[expert] = value
    return experts


@pytest.mark.parametrize(
    ("scheme", "size", "inner", "why"),
    [
        ("int4", 2, 192, "its 384 inputs aren't a multiple of 256"),
        ("fp8-block", 1, 192, "the 192 gates of an expert don't end with a block of 128"),
    ],
)
def test_cuts_that_scales_do_not_allow_are_refused(scheme: str, size: int, inner: int, why: str) -> None:
    layer = layer_of(0, size)
    method = method_of(layer, scheme)
    with pytest.raises(ValueError, match=f"can't compute the experts mlp.experts in '{scheme}' through qgemm: {why}"):
        method.create_weights(layer, 2, 256, inner, torch.float32)


@pytest.mark.parametrize("has_bias", [False, True])
def test_what_experts_need_is_said(has_bias: bool) -> None:
    stored = made_experts("mxfp4", True).state_dict()
    missing = "down_proj_bias" if has_bias else "gate_up_proj_scale"
    layer = layer_of(0, 1, has_bias)
    method = method_of(layer, "mxfp4")
    method.create_weights(layer, 4, 256, 512, torch.float32)
    for name in method.names:
        if name != missing:
            method.load(layer, name, stored[name])
    with pytest.raises(ValueError, match=rf"mlp.experts.{missing} isn't in the files, or not all of it"):
        method.process_weights_after_loading(layer)
    with pytest.raises(ValueError, match=r"gate_up_proj is \[3, 1024, 128\] in the files, but the layer has \[4"):
        method.load(layer, "gate_up_proj", stored["gate_up_proj"][:3])


def test_biases_that_the_layer_does_not_have_are_refused() -> None:
    layer = layer_of(0, 1)
    method = method_of(layer, "int8")
    method.create_weights(layer, 4, 256, 512, torch.float32)
    with pytest.raises(ValueError, match=r"mlp.experts in 'int8' .* the files have a down_proj_bias, which vLLM's"):
        method.load(layer, "down_proj_bias", torch.zeros(4, 256))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"activation": "swiglustep"}, r"their activation is 'swiglustep'; it must be .*'swigluoai'\]"),
        ({"apply_router_weight_on_input": True}, "their input is weighted by the router"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=rf"can't compute the experts mlp.experts in 'mxfp4' .*: {why}"):
        method_of(layer_of(0, 1, **changes), "mxfp4")


def test_limits_of_activations() -> None:
    assert method_of(layer_of(0, 1, swiglu_limit=5.0), "int8").activation == GatedActivation("silu", limit=5.0)
    # vLLM has no limit for others, and that of GPT-OSS is a constant.
    assert method_of(layer_of(0, 1, activation="gelu", swiglu_limit=5.0), "int8").activation == GatedActivation("gelu")
    assert method_of(layer_of(0, 1, activation="swigluoai"), "int8").activation == GPT_OSS


def test_layers_that_vllm_has_in_float_only_are_refused(tmp_path: Path) -> None:
    made = qgemm.quantize_model(model("gpt_oss"), "int8", include="lm_head", progress=False)
    made.save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="lm_head is quantized, but vLLM's GptOssForCausalLM has it in float only"):
        tokens_of_vllm(tmp_path / "head")


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    made = qgemm.quantize_model(model("gpt_oss"), "int8-weight", progress=False)
    made.save_pretrained(tmp_path / "mixture")
    with pytest.raises(
        ValueError, match=r"can't compute the experts .* they have no adapters, .* --lora-target-modules"
    ):
        tokens_of_vllm(tmp_path / "mixture", enable_lora=True)
    # Other layers may have some.
    options = {"enable_lora": True, "lora_target_modules": ["qkv_proj", "o_proj"]}
    assert tokens_of_vllm(tmp_path / "mixture", **options) == tokens_of_transformers(made)
