"""What counts as a weight in a product, what is an output head, and what stays in float for what it is itself."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from qgemm import QuantLinear, quantize_model
from qgemm.model.report import report
from qgemm.model.survey import find_layers


def _reasons(model: nn.Module) -> dict[str, str]:
    return {layer.name: layer.reason for layer in find_layers(model) if layer.reason}


def _on_meta(name: str, **settings: Any) -> nn.Module:
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model: nn.Module = cls(cls.config_class(**settings))
    return model


def test_a_large_model_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Once a layer took seconds: the modules of a model with thousands of layers, for each of them.
    model = _on_meta("LlamaForCausalLM", num_hidden_layers=20, hidden_size=64, intermediate_size=64)
    named_modules, seen = nn.Module.named_modules, []

    def counted(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        for found in named_modules(self, *arguments, **options):
            seen.append(found)
            yield found

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    layers = find_layers(model)
    monkeypatch.undo()
    assert sum(not layer.reason for layer in layers) == 140
    # A call for a module calls for its children, and all of them yield it again.
    depth = 1 + max(name.count(".") for name, _ in model.named_modules())
    assert len(seen) < 10 * depth * len(list(model.modules()))


def test_float64_stays() -> None:
    # Its inputs are float64 too, which no quantized layer takes.
    with pytest.raises(ValueError, match=r"its weight is torch\.float64"):
        quantize_model(nn.Sequential(nn.Linear(4, 4)).double())


def test_lazy_layers_stay_until_they_have_run() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))

    model = quantize_model(build())
    assert isinstance(model[0], QuantLinear)
    assert model(torch.randn(2, 4)).shape == (2, 4)
    # The way out that the reason names.
    model = build()
    model(torch.randn(2, 4))
    assert report(quantize_model(model)).kept == ()


# Weights that modules hold and multiply by themselves.


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shape = (64, 64)
        for name in ("at", "transposed", "in_linear", "in_einsum", "by_variable", "chosen", "unused", "table"):
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 8))
        self.batched = nn.Parameter(torch.randn(2, 64, 64) / 8)
        self.gate_bias = nn.Parameter(torch.zeros(2, 4096))
        self.small = nn.Parameter(torch.randn(64, 4))
        self.positions = nn.Parameter(torch.randn(1, 64, 64))
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x + self.positions[0, 0]) * self.table[0]
        x = x @ self.at @ self.transposed.t()
        x = F.linear(x, self.in_linear)
        x = torch.einsum("bk,kn->bn", x, self.in_einsum)
        weight = self.by_variable.to(x.dtype)
        x = x.matmul(weight)
        x = x.mm(torch.index_select(self.chosen, 0, torch.arange(64)))
        x = torch.baddbmm(self.gate_bias[:, None, :64], x.expand(2, -1, -1), self.batched)[0]
        return torch.cat([x, x @ self.small], -1)


def test_weights_that_a_module_multiplies_by_itself_are_listed_and_others_are_not() -> None:
    model = quantize_model(nn.Sequential(Held()))
    found = report(model)
    names = ("at", "transposed", "in_linear", "in_einsum", "by_variable", "chosen", "batched")
    assert {record.name: record.reason for record in found.kept} == dict.fromkeys(
        (f"0.{name}" for name in names), "no layer holds it: Held multiplies by it itself"
    )
    assert found.bytes_before == 4 * (8 * 64 * 64 + 64 * 64 + 64)
    assert model(torch.randn(3, 64)).shape == (3, 68)


def test_a_subclass_multiplies_by_what_its_base_does() -> None:
    class Inherits(Held):
        pass

    assert "0.at" in _reasons(nn.Sequential(Inherits()))


def test_without_source_every_weight_of_a_size_counts() -> None:
    scope: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(
        "class Prompt(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = nn.Parameter(torch.randn(64, 64))\n",
        scope,
    )
    linecache.clearcache()
    assert set(_reasons(nn.Sequential(scope["Prompt"](), nn.Linear(4, 4)))) == {"0.w"}


class SomeExpertGLU(nn.Module):
    """As DBRX holds its experts: those of one kind below one another, multiplied by another class."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(128, 32))
        self.b_bias = nn.Parameter(torch.randn(128, 32))


class ExpertRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def test_experts_of_two_dimensions_are_listed_and_a_router_is_none() -> None:
    reasons = _reasons(nn.Sequential(SomeExpertGLU(), ExpertRouter()))
    assert reasons == {
        "0.w1": "fused experts: its layout of experts isn't one that qgemm knows",
        "1.weight": "no layer holds it: ExpertRouter multiplies by it itself",
    }


def test_tables_and_convolutions_are_no_products() -> None:
    model = nn.Sequential(nn.Embedding(64, 64), nn.EmbeddingBag(64, 64), nn.Conv1d(64, 64, 3), nn.LayerNorm((64, 64)))
    assert find_layers(model) == []


@pytest.mark.parametrize(
    ("name", "settings", "held"),
    [
        (
            "XLNetModel",
            {"d_model": 64, "n_head": 4, "n_layer": 1, "d_inner": 64, "vocab_size": 50},
            {f"layer.0.rel_attn.{name}" for name in "qkvor"},
        ),
        (
            "FunnelBaseModel",
            {"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 64, "block_sizes": [1], "vocab_size": 50},
            {"encoder.blocks.0.0.attention.r_kernel"},
        ),
        (
            "RecurrentGemmaModel",
            {
                "hidden_size": 64,
                "lru_width": 128,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "intermediate_size": 64,
                "vocab_size": 50,
            },
            {f"layers.0.temporal_block.rg_lru.{name}_gate_weight" for name in ("input", "recurrent")},
        ),
    ],
)
def test_weights_that_transformers_classes_multiply_by(name: str, settings: dict[str, Any], held: set[str]) -> None:
    assert {name for name, reason in _reasons(_on_meta(name, **settings)).items() if "no layer" in reason} == held


# Output heads.


class Body(nn.Module):
    def __init__(self, **heads: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.inner = nn.Linear(32, 32)
        for name, head in heads.items():
            self.add_module(name, head)


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8), nn.Softmax(-1))


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (lambda: Body(lm_head=nn.Linear(32, 50)), {"lm_head"}),
        (lambda: Body(head=nn.Linear(32, 8)), {"head"}),
        (lambda: Body(output_projection=nn.Linear(32, 50)), {"output_projection"}),
        # Of a container the last one alone.
        (lambda: Body(classifier=_classifier()), {"classifier.2"}),
        (lambda: Body(lm_heads=nn.ModuleList(nn.Linear(32, 9) for _ in range(2))), {"lm_heads.0", "lm_heads.1"}),
        # In a wrapper.
        (lambda: nn.Sequential(Body(head=nn.Linear(32, 8))), {"0.head"}),
        # Further in: what maps to the vocabulary is a head, a projection of attention isn't.
        (lambda: nn.Sequential(Body(output_projection=nn.Linear(32, 50)), nn.ReLU()), {"0.output_projection"}),
        (lambda: nn.Sequential(Body(output_projection=nn.Linear(32, 32)), nn.ReLU()), set()),
        (lambda: nn.Sequential(Body(lm_head=nn.Linear(32, 9)), nn.ReLU()), {"0.lm_head"}),
        # By its name alone nothing else is one, though it be the last.
        (lambda: Body(out=nn.Linear(32, 50)), set()),
    ],
)
def test_output_heads_of_plain_models(model: Any, heads: set[str]) -> None:
    assert _reasons(model()) == dict.fromkeys(heads, "output head")


def test_a_model_that_is_but_a_head_says_what_to_do() -> None:
    model = nn.ModuleDict({"features": nn.Conv2d(3, 8, 3), "head": nn.Linear(8, 4)})
    with pytest.raises(ValueError, match=r"1 x output head\); include=\[\.\.\.\] overrules what stays by default"):
        quantize_model(model)
    quantize_model(model, include="head")


def test_heads_of_bark_and_fsmt() -> None:
    sizes = {"hidden_size": 32, "num_heads": 2, "num_layers": 1, "input_vocab_size": 40, "output_vocab_size": 30}
    assert _reasons(_on_meta("BarkSemanticModel", **sizes)) == {"lm_head": "output head"}
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32}
    vocabularies = {"src_vocab_size": 40, "tgt_vocab_size": 50, "langs": ["en", "de"]}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "tie_word_embeddings": False}
    model = _on_meta("FSMTForConditionalGeneration", **sizes, **vocabularies, **heads)
    assert _reasons(model) == {"model.decoder.output_projection": "output head"}


class Pretrained(nn.Module):
    """As ``PreTrainedModel`` says what its base model is."""

    def __init__(self, base_model_prefix: str, **parts: nn.Module) -> None:
        super().__init__()
        self.base_model_prefix = base_model_prefix
        for name, part in parts.items():
            self.add_module(name, part)


def test_a_tower_beside_the_base_model_is_no_task_head() -> None:
    base, tower = (Pretrained("model", layer=nn.Linear(8, 8)) for _ in range(2))
    wrapper = Pretrained("model", model=base, tower=tower, score=nn.Linear(8, 2))
    assert _reasons(wrapper) == {"score": "task head, outside the base model"}


def test_a_parametrized_layer_counts_with_the_weights_that_its_own_is_computed_from() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    nn.utils.parametrizations.spectral_norm(model[0])
    assert [layer.bytes for layer in find_layers(model)] == [32 * 32 * 4, 32 * 32 * 4]
