"""Tensor and expert parallelism: two processes, each with its part of every layer, against one with the whole model.

Each has a GPU where there are two, and both compute on the CPU elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from families import Example
from families.example import example, tokens
from processes import FORKED, keep_what_is_imported
from torch import distributed, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import qgemm
from integrations.folders import BY_EXPERT, assert_same, in_two, load_part
from qgemm import QuantExperts
from qgemm.integrations.transformers import tensor_parallel
from qgemm.integrations.transformers.tensor_parallel import WHOLE, is_cut, plan_layers
from qgemm.nn import LinearLayer, QuantLayer

# As many of each as make halves of whole groups; those of intermediate_size aren't whole blocks of packed codes.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.05,
}
# How far the output may be from the whole model's: scales of half a row are finer ones.
SCHEMES = {"int8-static": 1e-6, "int8": 0.04, "int4": 2e-6, "int8-hadamard": 0.04}
EXPERTS = {"int8": 0.04}
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def here() -> torch.device:
    """Where this process computes."""
    has_gpu = distributed.is_initialized() and distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": (tokens() % 96).to(here())}


def prompts() -> torch.Tensor:
    return (tokens() % 90 + 1).to(here())


def placed(made: Example) -> Example:
    made.model.to(here())
    return made


def float_model(experts: bool = False) -> Example:
    if experts:
        few = {"moe_intermediate_size": 512, "num_experts": 4, "num_experts_per_tok": 2}
        return example(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **few), **inputs())
    return example(LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True), **inputs())


def gathering_model() -> Example:
    """Whose layers gather their outputs, or read their part of a whole input; in int8."""
    made = example(Phi3ForCausalLM, Phi3Config(**SIZES, pad_token_id=0), **inputs())
    qgemm.quantize_model(made.model, "int8")
    return placed(made)


def gpt_oss() -> Example:
    """Whose experts have biases; in mxfp4."""
    few: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"]}
    made = example(GptOssForCausalLM, GptOssConfig(**SIZES, **few), **inputs())
    qgemm.quantize_model(made.model, "mxfp4", skip="*.self_attn")
    return placed(made)


def quantized(scheme: str, experts: bool = False) -> Example:
    made = float_model(experts)
    scales = None
    if scheme == "int8-static":
        scales = {name: 0.05 for name, module in made.model.named_modules() if type(module) is nn.Linear}
        del scales["lm_head"]
    qgemm.quantize_model(made.model, scheme, input_scales=scales)
    return placed(made)


def parallel(
    folder: Path, kind: Any = LlamaForCausalLM, by_expert: bool = False, plan: Any = "auto", **options: Any
) -> Any:
    return kind.from_pretrained(folder, distributed_config=in_two(plan, by_expert), **options)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def gradient(model: Any) -> torch.Tensor:
    """Of the embeddings."""
    x = model.get_input_embeddings()(inputs()["input_ids"]).detach().requires_grad_()
    model(inputs_embeds=x, use_cache=False).logits.square().sum().backward()
    assert x.grad is not None
    return x.grad


@contextmanager
def sums(expected: int) -> Iterator[None]:
    """So often processes add something up."""
    found, add = [], distributed.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(args)
        return add(*args, **kwargs)

    distributed.all_reduce = counted
    try:
        yield
    finally:
        distributed.all_reduce = add
    assert len(found) == expected


def same_tokens(rank: int, model: Any) -> torch.Tensor:
    """The fast loop has the tokens of transformers', and sampled ones are the same in both processes."""
    ids = prompts()
    expected: torch.Tensor = model.generate(ids, **GREEDY)
    qgemm.fast_generate(qgemm.fuse(model))
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert model._qgemm_generate.told == set()
    torch.manual_seed(rank)
    drawn = model.generate(ids, **{**GREEDY, "do_sample": True})
    both = [torch.empty_like(drawn) for _ in range(2)]
    distributed.all_gather(both, drawn)
    assert torch.equal(*both)
    return expected[:, ids.shape[1] :]


def batched(model: Any) -> torch.Tensor:
    """The tokens of ``generate_batch``."""
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    done = model.generate_batch(prompts().tolist(), generation_config=settings, continuous_batching_config=small)
    return torch.tensor([each.generated_tokens for each in done.values()])


def join(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    options: dict[str, Any] = {"init_method": f"file://{folder / 'store'}", "rank": rank, "world_size": 2}
    if torch.cuda.device_count() < 2:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or transformers would look for one for each process
        distributed.init_process_group("gloo", **options)
        return
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank), **options)


def one_process(rank: int, folder: Path) -> None:
    keep_what_is_imported()
    join(rank, folder)
    try:
        for scheme, most in SCHEMES.items():
            look_at_layers(scheme, most, folder)
        for scheme, most in EXPERTS.items():
            look_at_experts(rank, scheme, most, folder)
        look_at_gathered_outputs(folder)
        look_at_experts_with_biases(folder)
        look_at_branches_side_by_side(folder)
        look_at_tokens(rank, folder)
        look_at_int8_keys(folder)
        look_at_quantizing(folder)
    finally:
        distributed.destroy_process_group()


def look_at_layers(scheme: str, most: float, folder: Path) -> None:
    """Local parameters, the output before and after fusion, and what is saved."""
    whole = quantized(scheme)
    expected = whole.output()
    model = parallel(folder / scheme)
    cut = Example(model, whole.inputs)
    layer = model.model.layers[0]
    parameters = [each for one in layer.modules() if isinstance(one, QuantLayer) for each in one.parameters()]
    assert {type(each) for each in parameters} == {nn.Parameter}
    assert list(layer.self_attn.q_proj.bias.shape) == [256]
    assert (layer.mlp.down_proj.in_features, layer.mlp.down_proj.out_features) == (384, 512)
    assert error(cut.output(), expected) < most, scheme
    assert error(gradient(model), gradient(whole.model)) < 2 * most, scheme
    model.save_pretrained(folder / f"{scheme}-again")
    with pytest.raises(ValueError, match=r"this model is split among processes: call model.save_pretrained"):
        qgemm.save_quantized(model, folder / "own")
    with sums(2):
        before = cut.output()
    qgemm.fuse(model)
    assert scheme == "int8-hadamard" or qgemm.fusion_report(model).fused
    with sums(2):
        assert error(cut.output(), before) < 1e-5, scheme
    # With the scales of whole rows it is the whole model, but for the order of additions.
    qgemm.share_scales(model)
    assert error(cut.output(), expected) < 2e-6, scheme
    assert error(Example(qgemm.unfuse(model), whole.inputs).output(), cut.output()) < 1e-5, scheme


def look_at_experts(rank: int, scheme: str, most: float, folder: Path) -> None:
    whole = quantized(scheme, experts=True)
    for by_expert in BY_EXPERT:
        model = parallel(folder / f"experts-{scheme}", Qwen3MoeForCausalLM, by_expert)
        experts = model.model.layers[0].mlp.experts
        assert list(experts.gate_up_proj.shape[:2]) == ([2, 1024] if by_expert else [4, 512])
        cut = Example(model, whole.inputs)
        # From 5.20 on, transformers splits attention beside experts too.
        is_exact = by_expert and model.model.layers[0].self_attn.o_proj.shard is None
        assert error(cut.output(), whole.output()) < (2e-6 if is_exact else most), scheme
        number = 1 if is_exact else 2
        with sums(number):
            before = cut.output()
        (record,) = qgemm.fusion_report(qgemm.fuse(model)).records
        assert ("mixture" in record.parts, record.reason) == (True, ""), scheme
        with sums(number):
            assert error(cut.output(), before) < 1e-5, scheme
        same_tokens(rank, qgemm.unfuse(model))
        model.save_pretrained(folder / f"experts-{scheme}-{by_expert}-again")


def look_at_gathered_outputs(folder: Path) -> None:
    whole, model = gathering_model(), parallel(folder / "phi3", Phi3ForCausalLM)
    expected, cut = whole.output(), Example(model, whole.inputs)
    layers = [layer for layer in model.modules() if isinstance(layer, LinearLayer)]
    assert [layer.shard.is_open for layer in layers if layer.shard is not None] == [False] * 4
    assert error(cut.output(), expected) < SCHEMES["int8"]
    assert error(gradient(model), gradient(whole.model)) < 2 * SCHEMES["int8"]
    before = cut.output()
    assert error(Example(qgemm.fuse(model), whole.inputs).output(), before) < 1e-5
    qgemm.share_scales(model)
    assert error(cut.output(), expected) < 2e-6
    model.save_pretrained(folder / "phi3-again")


# transformers (5.17 and 5.19) has no such plan for it.
COLUMNS = {f"model.layers.*.mlp.experts{leaf}": style for leaf, style in (
    ("", "moe_tp_experts"), (".gate_up_proj", "packed_colwise"), (".gate_up_proj_bias", "packed_colwise"),
    (".down_proj", "rowwise"))}  # fmt: skip


def look_at_experts_with_biases(folder: Path) -> None:
    whole = gpt_oss()
    for by_expert in BY_EXPERT:
        model = parallel(folder / "gpt-oss", GptOssForCausalLM, by_expert, "auto" if by_expert else dict(COLUMNS))
        shard = model.model.layers[0].mlp.experts.shard
        assert (shard.style, shard.size) == ("expert" if by_expert else "column", 2)
        cut = Example(model, whole.inputs)
        assert error(cut.output(), whole.output()) < 2e-6
        before = cut.output()
        assert error(Example(qgemm.fuse(model), whole.inputs).output(), before) < 1e-5
        assert "as its class" not in str(qgemm.fusion_report(model))
        model.save_pretrained(folder / f"gpt-oss-{by_expert}-again")


def look_at_branches_side_by_side(folder: Path) -> None:
    """Their products are added up first by each process, and then among all."""
    model = parallel(folder / "cohere", CohereForCausalLM)
    cut = Example(model, inputs())
    before = cut.output()
    qgemm.fuse(model)
    with sums(1):
        assert error(cut.output(), before) < 1e-5


def look_at_tokens(rank: int, folder: Path) -> None:
    model = parallel(folder / "int8")
    expected = same_tokens(rank, model)
    with pytest.warns(UserWarning, match="max_time is set"):
        model.generate(prompts(), **GREEDY, max_time=60.0)
    assert torch.equal(batched(model), expected[:, :4].cpu())


def look_at_int8_keys(folder: Path) -> None:
    """Each process has some heads' keys and values, with scales of their own, so the tokens are one process's."""
    whole, model = quantized("int8-static").model, parallel(folder / "int8-static")
    ids = prompts()
    for each in (whole, model):
        qgemm.fast_generate(qgemm.fuse(each), cache_dtype=torch.int8)
    expected = whole.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert model._qgemm_generate.told == set()
    assert torch.equal(batched(model), expected[:, ids.shape[1] :][:, :4].cpu())


def look_at_quantizing(folder: Path) -> None:
    """A float checkpoint gives the parts of the model that one process quantizes."""
    skip = ["model.layers.0.mlp.up_proj"]
    model = parallel(folder / "float", quantization_config=qgemm.QGemmConfig("int8", skip=skip))
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    same = parallel(folder / "int8")
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLayer):
            for leaf, parameter in layer.named_parameters():
                assert torch.equal(parameter, same.get_submodule(name).stored(leaf)), f"{name}.{leaf}"
    # So does one that another library has quantized.
    model = parallel(folder / "foreign", quantization_config=qgemm.QGemmConfig())
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLayer):
            assert layer.shard is not None
            assert torch.equal(layer.stored("weight"), same.get_submodule(name).stored("weight")), name
    config = qgemm.QGemmConfig("int8-static", calibration=[{"input_ids": tokens()}])
    with pytest.raises(ValueError, match="calibration needs it whole"):
        parallel(folder / "float", quantization_config=config)


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    for scheme in SCHEMES:
        quantized(scheme).model.save_pretrained(tmp_path / scheme)
    for scheme in EXPERTS:
        quantized(scheme, experts=True).model.save_pretrained(tmp_path / f"experts-{scheme}")
    float_model().model.save_pretrained(tmp_path / "float")
    qgemm.save_quantized(quantized("int8").model, tmp_path / "foreign", format="compressed-tensors")
    qgemm.quantize_model(CohereForCausalLM(CohereConfig(**SIZES))).save_pretrained(tmp_path / "cohere")
    gathering_model().model.save_pretrained(tmp_path / "phi3")
    gpt_oss().model.save_pretrained(tmp_path / "gpt-oss")
    # A fork of this process imports nothing again, but could not use its GPU.
    method = FORKED.get_start_method() if torch.cuda.is_available() else "fork"
    torch.multiprocessing.start_processes(one_process, (tmp_path,), nprocs=2, start_method=method)
    for scheme in SCHEMES:
        assert_same(qgemm.load_quantized(tmp_path / f"{scheme}-again"), quantized(scheme).model)
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "int8-again"), quantized("int8").model)
    for scheme in EXPERTS:
        for by_expert in BY_EXPERT:
            saved = qgemm.load_quantized(tmp_path / f"experts-{scheme}-{by_expert}-again")
            assert_same(saved, quantized(scheme, experts=True).model)
    assert_same(qgemm.load_quantized(tmp_path / "phi3-again"), gathering_model().model)
    for by_expert in BY_EXPERT:
        assert_same(qgemm.load_quantized(tmp_path / f"gpt-oss-{by_expert}-again"), gpt_oss().model)


def planned(model: Any, plan: dict[str, str], size: int = 2, **options: Any) -> dict[str, str]:
    config = SimpleNamespace(tp_plan=plan, tp_size=size, **options)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLayer)}
    like = SimpleNamespace(config=SimpleNamespace(distributed_config=config), tp_plan={}, ep_plan={},
                           named_modules=model.named_modules, get_submodule=model.get_submodule)  # fmt: skip
    plan_layers(like, layers)  # type: ignore[arg-type]
    return plan


def test_a_plan_of_the_user_is_completed() -> None:
    plan = {"model.layers.*.mlp.down_proj": "rowwise", "model.layers.*.mlp.up_proj.weight": "packed_colwise",
            "lm_head": "colwise_rep", "model.norm": "sequence_parallel"}  # fmt: skip
    assert planned(quantized("int8").model, plan) == {
        "model.layers.*.mlp.down_proj": "qgemm_row_1_rowwise",
        "model.layers.*.mlp.up_proj": f"qgemm_column_2_{WHOLE}",
        "model.layers.*.mlp.up_proj.weight": "qgemm_column_2_packed_colwise",
        "lm_head": "qgemm_gathered_colwise_rep",
        "model.norm": "sequence_parallel",
    }
    assert planned(quantized("int8").model, dict(plan)) == plan  # once is enough


@pytest.mark.parametrize(
    ("scheme", "entry", "style", "reason"),
    [
        (
            "int8",
            "mlp.up_proj",
            "packed_rowwise",
            "a QuantLinear, in the style packed_rowwise, which qgemm doesn't know",
        ),
        ("int4", "self_attn.k_proj", "rowwise_rep", ""),
        (
            "int4-ordered",
            "mlp.up_proj",
            "rowwise",
            "a WeightOnlyLinear, .* and its columns are in an order of their own",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(scheme: str, entry: str, style: str, reason: str) -> None:
    model, plan = quantized(scheme).model, {f"model.layers.*.{entry}": style}
    if not reason:
        assert planned(model, plan)[f"model.layers.*.{entry}"] == f"qgemm_row_1_{style}"
        return
    with pytest.raises(ValueError, match=rf"would split model\.layers\.0\.{entry}, {reason}"):
        planned(model, plan)


def test_heads_stay_whole() -> None:
    model = quantized("int8").model
    planned(model, {"model.layers.*.self_attn.q_proj": "colwise"}, size=8)
    planned(model, {"model.layers.*.self_attn.k_proj": "colwise_gather_output"}, size=8)
    with pytest.raises(
        ValueError, match=r"self_attn\.k_proj, .* and the number of its heads, 4, can't be divided by 8 processes: load"
    ):
        planned(model, {"model.layers.*.self_attn.k_proj": "colwise"}, size=8)


def test_experts_in_float_beside_quantized_ones() -> None:
    few = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64}
    config = Qwen3MoeConfig(**{**SIZES, **few, "num_hidden_layers": 2})
    model = qgemm.quantize_model(Qwen3MoeForCausalLM(config), skip="model.layers.1.mlp.experts")
    plan = {f"model.{name}": style for name, style in config.base_model_ep_plan.items()}
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts, whose experts are in float"):
        planned(model, plan)
    assert isinstance(model.model.layers[0].mlp.experts, QuantExperts)
    assert isinstance(model.model.layers[0].self_attn.q_proj, LinearLayer)


def test_experts_among_other_processes_than_tensors() -> None:
    model = quantized("int8", experts=True).model
    with pytest.raises(ValueError, match=r"has ep_size 4 and tp_size 2; quantized experts .* make them equal"):
        planned(model, {}, ep_size=4)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"tp_size": None, "enable_expert_parallel": False}, False),  # transformers 5.17
        ({"tp_size": None, "enable_expert_parallel": True}, True),
        ({"tp_size": 1, "ep_size": 1}, False),  # one without the flag
        ({"tp_size": 2, "ep_size": 1}, True),
        ({"tp_size": 1, "ep_size": 2}, True),
    ],
)
def test_what_is_cut(sizes: dict[str, Any], wanted: bool) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(distributed_config=SimpleNamespace(**sizes)))
    assert is_cut(model) == wanted


def test_experts_that_are_put_into_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "NEEDS_FSDP", True)
    model = quantized("int8", experts=True).model
    with pytest.raises(ValueError, match=r"5\.19 puts a model .* into FSDP, .*: use transformers 5\.20 or later, or"):
        planned(model, {}, ep_size=2, ep_plan={"model.layers.*.mlp.experts": "ep_dispatch_experts"})


def test_a_part_is_no_float_model(tmp_path: Path) -> None:
    qgemm.save_quantized(quantized("int8").model, tmp_path)
    model = load_part(tmp_path)
    with pytest.raises(
        ValueError, match=r"split among processes: save it, load it in one process, and dequantize that"
    ):
        model.dequantize()
    with pytest.raises(ValueError, match=r"split among processes: call model.save_pretrained\(folder\) in all of them"):
        qgemm.save_quantized(model, tmp_path / "again")
    assert isinstance(model.model.layers[0].mlp.up_proj, LinearLayer)
