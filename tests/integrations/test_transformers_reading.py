"""What ``from_pretrained`` reads of a quantized folder: each process its part of the tensors, and nothing twice."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from checkpoint.models import tiny_llama
from families.example import example
from families.schemes import EVERY_LAYER, quantized_layer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.distributed import DistributedConfig

import qgemm
from integrations.folders import BY_EXPERT, assert_same, load_part
from qgemm import QuantExperts
from qgemm.checkpoint.safetensors_file import read_headers
from qgemm.nn import QuantLayer
from qgemm.nn.shard import Shard
from qgemm.scheme import resolve_scheme


class CountedFile:
    """A safetensors file of which it is known what was read, by name."""

    bytes_read: dict[str, int]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._file = safetensors.safe_open(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)

    def get_slice(self, name: str) -> Any:
        part = self._file.get_slice(name)

        class Counted:
            def __getattr__(self, attribute: str) -> Any:
                return getattr(part, attribute)

            def __getitem__(self, index: Any) -> torch.Tensor:
                value: torch.Tensor = part[index]
                CountedFile.bytes_read[name] = CountedFile.bytes_read.get(name, 0) + value.nbytes
                return value

        return Counted()


SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixture() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=128)
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_layers_of_a_model(tied: bool, tmp_path: Path) -> None:
    # As of a float model, to look at a part of a large one.
    model: Any = qgemm.quantize_model(tiny_llama(tied), {"*.up_proj": "int4", "*": "int8"})
    qgemm.save_quantized(model, tmp_path)
    first: Any = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=1)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    assert_same(first, model)
    names = [[each.name for each in qgemm.report(loaded).quantized] for loaded in (first, model)]
    assert names[0] == names[1]
    first.save_pretrained(tmp_path / "first")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "first"), model)


@pytest.mark.parametrize(
    ("build", "scheme", "experts"),
    [(llama, "int8", False), (llama, "int4", False), *((mixture, "int8", by_expert) for by_expert in BY_EXPERT)],
    ids=["int8", "int4", "columns of experts", "experts"][: 2 + len(BY_EXPERT)],
)
def test_a_process_reads_its_part_of_the_files_alone(
    build: Callable[[], Any], scheme: str, experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = qgemm.quantize_model(build(), scheme)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", CountedFile)
    monkeypatch.setattr(CountedFile, "bytes_read", {}, raising=False)
    part = load_part(tmp_path, type(model), experts)
    # Scales of whole rows that are cut are needed whole, and transformers cuts no norms and routers, and embeddings
    # from 5.24 on.
    whole = r"norm|mlp\.gate\."
    if not isinstance(part.get_input_embeddings().weight, DTensor):
        whole += "|embed_tokens"
    if scheme == "int8" and not experts:
        whole += r"|(o_proj|down_proj)\.weight_scale|down_proj_scale"
    stored = read_headers(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    for name, tensor in stored.items():
        if experts and "experts" not in name:
            continue
        if "rotary_emb" not in name:  # read afterwards, by qgemm
            assert CountedFile.bytes_read[name] * (1 if re.search(whole, name) else 2) == tensor.nbytes, name


# The others are read as one of these is.
LINEAR = ["int8", "int8-static-asymmetric", "int8-hadamard", "int8-outliers-16", "fp8", "fp8-block", "int4",
          "int4-int8", "int4-64-asymmetric-ordered-int8", "int8-weight", "mxfp4", "mxfp8", "nvfp4", "nf4"]  # fmt: skip
EXPERTS = ["int8", "fp8-block", "int4", "int4-32-asymmetric", "mxfp4", "nvfp4"]
EVERY_EXPERTS = sorted({resolve_scheme(scheme).for_experts().name for scheme in EVERY_LAYER})


def first(few: list[str], every: list[str]) -> list[Any]:
    """``every`` one, which takes ``--complete`` but for a ``few``."""
    assert {*few} < {*every}
    return [pytest.param(scheme, marks=[] if scheme in few else [pytest.mark.complete]) for scheme in every]


# Halves of 768 aren't whole blocks of packed codes, and those of all are whole groups.
HALVES: dict[str, Any] = {**SIZES, "intermediate_size": 768}
ROWS = ("o_proj", "down_proj")


def biased_llama() -> nn.Module:
    return example(LlamaForCausalLM, LlamaConfig(**HALVES, attention_bias=True, mlp_bias=True)).model


def quantized(model: Any, scheme: str, rows: str) -> Any:
    """All linear layers but the head in ``scheme``, those that are split along K in the scheme ``rows``."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name != "lm_head":
            model.set_submodule(name, quantized_layer(layer, rows if name.endswith(ROWS) else scheme))
    return model


def assert_parts(model: nn.Module, whole: nn.Module, is_open: bool = True, by_expert: bool = False) -> None:
    """``model`` has the second half of every quantized layer of ``whole``, bit for bit."""
    layers = {name: layer for name, layer in whole.named_modules() if isinstance(layer, QuantLayer)}
    assert layers
    for name, layer in layers.items():
        wanted, part = copy.deepcopy(layer), model.get_submodule(name)
        style: Any = "row" if name.endswith(ROWS) else "expert" if by_expert else "column"
        wanted.cut(Shard(style, None, 1, 2, is_open))
        assert isinstance(part, type(layer))
        assert {type(each) for each in part.parameters()} == {nn.Parameter}
        assert part.shard is not None
        assert (part.shard.style, part.shard.rank, part.shard.size) == (style, 1, 2), name
        assert (part.shard.is_open, part.shard.parts) == (is_open, 1), name
        assert part.extra_repr() == wanted.extra_repr()  # its sizes
        bias = part._parameters.get("bias")
        assert style != "row" or bias is None or not bias.any()  # the first process adds it
        values = dict(wanted.named_parameters())
        parameters = {leaf: parameter.cpu() for leaf, parameter in part.named_parameters()}
        assert parameters.keys() == values.keys(), name
        for leaf, value in values.items():
            assert parameters[leaf].dtype == value.dtype, f"{name}.{leaf}"
            assert torch.equal(parameters[leaf], value), f"{name}.{leaf}"


@pytest.mark.parametrize("scheme", first(LINEAR, EVERY_LAYER))
def test_the_parts_of_every_scheme(scheme: str, tmp_path: Path) -> None:
    is_ordered = resolve_scheme(scheme).weight.is_ordered
    whole = quantized(biased_llama(), scheme, "int4" if is_ordered else scheme)
    qgemm.save_quantized(whole, tmp_path)
    assert_parts(load_part(tmp_path, LlamaForCausalLM), whole)


@pytest.mark.parametrize("scheme", [scheme for scheme in EVERY_LAYER if resolve_scheme(scheme).weight.is_ordered])
def test_an_order_of_columns_is_refused_by_name(scheme: str, tmp_path: Path) -> None:
    qgemm.save_quantized(quantized(biased_llama(), scheme, scheme), tmp_path)
    with pytest.raises(
        ValueError, match=r"would split model\.layers\.0\.self_attn\.o_proj, a \w+, .*its columns are in an order of"
    ):
        load_part(tmp_path, LlamaForCausalLM)


def test_groups_that_would_be_cut_are_refused_by_name(tmp_path: Path) -> None:
    """Of a float folder, before anything is read of it."""
    biased_llama().save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(
        ValueError, match=r"o_proj, a WeightOnlyLinear, .*its 512 inputs aren't a multiple of 1024, 2 blocks of 512"
    ):
        load_part(tmp_path, LlamaForCausalLM, quantization_config=qgemm.QGemmConfig("int4-512"))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_layers_whose_outputs_are_gathered(scheme: str, tmp_path: Path) -> None:
    config = Phi3Config(**HALVES, pad_token_id=0)
    whole = quantized(Phi3ForCausalLM(config), scheme, scheme)
    qgemm.save_quantized(whole, tmp_path)
    assert_parts(load_part(tmp_path, Phi3ForCausalLM), whole, is_open=False)


@pytest.mark.parametrize("by_expert", BY_EXPERT)
@pytest.mark.parametrize("scheme", first(EXPERTS, EVERY_EXPERTS))
def test_the_parts_of_experts(scheme: str, by_expert: bool, tmp_path: Path) -> None:
    width = 512 if scheme in ("int4", "nvfp4") else 768  # whole blocks of packed codes in halves, or none
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=width, num_experts=2, num_experts_per_tok=1, head_dim=128)
    whole = qgemm.quantize_model(Qwen3MoeForCausalLM(config), scheme, include="*.experts", skip="re:self_attn")
    whole.save_pretrained(tmp_path)
    assert isinstance(whole.model.layers[0].mlp.experts, QuantExperts)
    assert_parts(load_part(tmp_path, Qwen3MoeForCausalLM, by_expert), whole, by_expert=by_expert)


def test_a_plan_of_the_user(tmp_path: Path) -> None:
    """It goes before the model's own, and stays as it was given."""
    whole = quantized(biased_llama(), "int4", "int8")
    qgemm.save_quantized(whole, tmp_path)
    plan = {f"model.layers.*.mlp.{name}_proj": "colwise_gather_output" for name in ("gate", "up")}
    plan["model.layers.*.mlp.down_proj"] = "rowwise_split_input"
    config = DistributedConfig(tp_size=2, tp_plan=(given := dict(plan)))
    for _ in range(2):
        model = load_part(tmp_path, LlamaForCausalLM, config=config)
        assert_parts(model.model.layers[0].mlp, whole.model.layers[0].mlp, is_open=False)
        assert given == plan
