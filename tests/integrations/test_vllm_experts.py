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
from qgemm.checkpoint.manifest import Manifest
from qgemm.integrations.vllm.names import for_vllm
from qgemm.nn import QuantExperts
from qgemm.nn.parallel import Shard
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
    ],
)
def test_a_mixture_of_experts(family: str, scheme: str, tmp_path: Path) -> None:
    made = qgemm.quantize_model(model(family), scheme, progress=False)
    assert {name for name, module in made.named_modules() if isinstance(module, qgemm.QuantExperts)}
    made.save_pretrained(tmp_path / "mixture")
    assert tokens_of_vllm(tmp_path / "mixture") == tokens_of_transformers(made)


@pytest.mark.parametrize("scheme", ["int8", "mxfp4"])
def test_weights_without_meaning(scheme: str, tmp_path: Path) -> None:
    """vLLM's dummy weights, for measuring: scales have either sign, and those of one byte are left as they are."""
    qgemm.quantize_model(model("qwen3_moe"), scheme, progress=False).save_pretrained(tmp_path / "mixture")
    (tmp_path / "mixture" / "model.safetensors").unlink()
    assert [len(tokens) for tokens in tokens_of_vllm(tmp_path / "mixture", load_format="dummy")] == [NEW] * len(PROMPTS)


def layer_of(tp_rank: int, tp_size: int, **changes: Any) -> Any:
    """As much of vLLM's fused experts as the method reads, on one of some ranks."""
    layer = nn.Module()
    parallel = SimpleNamespace(tp_size=tp_size, tp_rank=tp_rank)
    config = SimpleNamespace(has_bias=False, moe_parallel_config=parallel)
    values = {"moe_config": config, "expert_map": None, "activation": "silu", **changes}
    for name, value in values.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize("scheme", ["int8", "fp8-block", "int4-32", "int4-channel-asymmetric", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_loaded_on_one_of_two_ranks(scheme: str, rank: int) -> None:
    from qgemm.integrations.vllm.experts import QGemmExpertsMethod

    experts = made_experts(scheme)
    layer = layer_of(rank, 2)
    method = QGemmExpertsMethod(experts.scheme, "mlp.experts", layer)
    method.create_weights(layer, 2, 256, 256, torch.float32)
    shards = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
    files = ((f"experts.{name}", value) for name, value in experts.state_dict().items())
    for name, value in for_vllm(files, Manifest({"experts": experts.scheme}, {})):
        _, expert, part, leaf = name.split(".")
        short, shard_id = shards[part]
        parameter = getattr(layer, f"{short}_{leaf}")
        loaded = parameter.weight_loader(
            param=parameter, loaded_weight=value, weight_name=name, shard_id=shard_id, expert_id=int(expert),
            return_success=True,
        )  # fmt: skip
        assert loaded
    method.process_weights_after_loading(layer)
    own = made_experts(scheme)
    own.cut(Shard("column", None, rank, 2))
    for name, wanted in own.named_parameters():
        found = getattr(layer, method.names[name])
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), name
    x, weights = torch.randn(5, 256), torch.rand(5, 2)
    index = torch.randint(0, 2, (5, 2))
    assert torch.equal(method.apply(layer, x, weights, index), own._compute(x, index, weights, None))


def made_experts(scheme: str) -> QuantExperts:
    """Two experts of 512 values between their products, with weights of their own scales."""
    torch.manual_seed(0)
    experts = QuantExperts(2, 256, 512, scheme=scheme)
    for name in ("gate_up_proj", "down_proj"):
        for expert in range(2):
            made = experts.linear_of(name, expert)
            made.take_weight(torch.randn(made.out_features, made.in_features) * (1 + expert))
            for leaf, value in made.named_parameters():
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
    from qgemm.integrations.vllm.experts import QGemmExpertsMethod

    layer = layer_of(0, size)
    method = QGemmExpertsMethod(resolve_scheme(scheme), "mlp.experts", layer)
    with pytest.raises(ValueError, match=f"can't compute the experts mlp.experts in '{scheme}' through qgemm: {why}"):
        method.create_weights(layer, 2, 256, inner, torch.float32)


def test_what_experts_need_is_said() -> None:
    from qgemm.integrations.vllm.experts import QGemmExpertsMethod

    layer = layer_of(0, 1)
    method = QGemmExpertsMethod(resolve_scheme("mxfp4"), "mlp.experts", layer)
    method.create_weights(layer, 2, 256, 128, torch.float32)
    with pytest.raises(ValueError, match=r"mlp.experts.gate_up_proj_scale isn't in the files, or not all of it"):
        method.process_weights_after_loading(layer)
    layer.moe_config.has_bias = True
    with pytest.raises(ValueError, match=r"can't compute the experts mlp.experts in 'mxfp4' .* they have biases"):
        QGemmExpertsMethod(resolve_scheme("mxfp4"), "mlp.experts", layer)
