"""Tensor parallelism: two processes, each with its part of every layer, against one process with the whole model."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from families import Example
from families.example import example, tokens
from processes import FORKED
from torch import distributed, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import qgemm
from integrations.folders import assert_same
from qgemm import QuantLinear
from qgemm.integrations.transformers.tensor_parallel import WHOLE, plan_layers
from qgemm.nn import LinearLayer

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


def quantized(scheme: str) -> Example:
    made = example(LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True), input_ids=tokens() % 96)
    scales = None
    if scheme == "int8-static":
        scales = {name: 0.05 for name, module in made.model.named_modules() if type(module) is nn.Linear}
        del scales["lm_head"]
    qgemm.quantize_model(made.model, scheme, input_scales=scales)
    return made


def local(parameter: torch.Tensor) -> list[int]:
    return list(parameter.to_local().shape if hasattr(parameter, "to_local") else parameter.shape)  # type: ignore[operator]


def one_process(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        for scheme in ("int8-static", "int8"):
            whole = quantized(scheme)
            expected = whole.output()
            config = DistributedConfig(tp_plan="auto")
            model: Any = LlamaForCausalLM.from_pretrained(folder / scheme, distributed_config=config)
            attention = model.model.layers[0].self_attn
            assert isinstance(attention.q_proj, QuantLinear)
            shapes = {leaf: local(parameter) for leaf, parameter in attention.q_proj.named_parameters()}
            assert (shapes["weight"], shapes["weight_scale"], shapes["bias"]) == ([32, 64], [32], [32])
            shapes = {leaf: local(parameter) for leaf, parameter in attention.o_proj.named_parameters()}
            assert (shapes["weight"], shapes["weight_scale"], shapes["bias"]) == ([64, 32], [64], [64])
            error = (Example(model, whole.inputs).output() - expected).norm() / expected.norm()
            # The same scales give the same products, added up in another order. Scales of half a row are finer ones.
            assert error < (1e-6 if scheme == "int8-static" else 0.03), scheme
            model.save_pretrained(folder / f"{scheme}-again")
            with pytest.raises(ValueError, match="quantize and save the model first"):
                LlamaForCausalLM.from_pretrained(
                    folder / "float", quantization_config=qgemm.QGemmConfig(), distributed_config=config
                )
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    for scheme in ("int8", "int8-static"):
        quantized(scheme).model.save_pretrained(tmp_path / scheme)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "float")
    torch.multiprocessing.start_processes(one_process, (tmp_path,), nprocs=2, start_method=FORKED.get_start_method())
    for scheme in ("int8", "int8-static"):
        whole = quantized(scheme).model
        assert_same(LlamaForCausalLM.from_pretrained(tmp_path / f"{scheme}-again"), whole)
        assert_same(qgemm.load_quantized(tmp_path / f"{scheme}-again"), whole)


def planned(model: Any, plan: dict[str, str]) -> dict[str, str]:
    config = SimpleNamespace(distributed_config=SimpleNamespace(tp_plan=plan))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    plan_layers(SimpleNamespace(config=config, tp_plan={}), layers)  # type: ignore[arg-type]
    return plan


def test_a_plan_of_the_user_is_completed() -> None:
    plan = planned(quantized("int8").model, {"model.layers.*.mlp.down_proj": "rowwise", "lm_head": "colwise_rep"})
    assert plan == {
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.layers.*.mlp.down_proj.weight_scale": WHOLE,
        "lm_head": "colwise_rep",
    }


@pytest.mark.parametrize("entry", ["model.layers.*.mlp.up_proj", "model.layers.*.mlp.up_proj.weight"])
def test_a_style_in_which_scales_do_not_follow(entry: str) -> None:
    # Packed weights are cut into halves of halves, vectors beside them in one piece.
    with pytest.raises(
        ValueError, match=r"would split model\.layers\.0\.mlp\.up_proj, a QuantLinear, .* packed_colwise"
    ):
        planned(quantized("int8").model, {entry: "packed_colwise"})


@pytest.mark.parametrize("scheme", ["int4", "int8-hadamard"])
@pytest.mark.parametrize("style", ["rowwise", "colwise"])
def test_other_schemes_are_refused(scheme: str, style: str) -> None:
    # A part of a packed word, or of what a rotation mixes, is of no use by itself.
    layers = {name: layer for name, layer in quantized(scheme).model.named_modules() if isinstance(layer, LinearLayer)}
    config = SimpleNamespace(distributed_config=SimpleNamespace(tp_plan={"model.layers.*.mlp.up_proj": style}))
    with pytest.raises(ValueError, match=r"would split model\.layers\.0\.mlp\.up_proj, a (WeightOnly|Rotated)Linear"):
        plan_layers(SimpleNamespace(config=config, tp_plan={}), layers)  # type: ignore[arg-type]


def test_experts_are_refused() -> None:
    sizes = {**SIZES, "num_hidden_layers": 1, "head_dim": 16}
    config = Qwen3MoeConfig(**sizes, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    model: Any = qgemm.quantize_model(Qwen3MoeForCausalLM(config))
    model.config.distributed_config = SimpleNamespace(tp_plan="auto", enable_expert_parallel=False)
    layers = {"model.layers.0.mlp.experts": model.model.layers[0].mlp.experts}
    with pytest.raises(ValueError, match=r"would split model\.layers\.0\.mlp\.experts, a QuantExperts"):
        plan_layers(model, layers)
