"""Which folds are found in models, that they change nothing, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, Example
from families.example import DEPTH, VOCABULARY, language_model
from families.mixtures import MIXTURES
from torch import Tensor, nn
from torch.nn import functional as F

from calibration.blocks import block_of
from qgemm.calibration.folding import Fold, find_folds, input_weights
from qgemm.calibration.method import Block, Call, LayerWork
from qgemm.nn import QuantLinear
from qgemm.nn.linear_layer import linear_weight
from qgemm.scheme import SCHEMES

SMALL = {**DEPTH, "vocab_size": VOCABULARY, "intermediate_size": 96, "num_key_value_heads": 2, "pad_token_id": None}


def build(family: str) -> tuple[Example, Block]:
    example = {**FAMILIES, **MIXTURES}[family]()
    return example, block_of(example.model, example.inputs)


def ends(fold: Fold) -> tuple[str, set[str]]:
    return fold.source.rpartition(".")[2], {name.rpartition(".")[2] for name in fold.layers}


QKV = {"q_proj", "k_proj", "v_proj"}
# In the last block of each: what makes the input, and the layers that take it.
EXPECTED: dict[str, list[tuple[str, set[str]]]] = {
    "llama": [
        ("input_layernorm", QKV),
        ("post_attention_layernorm", {"gate_proj", "up_proj"}),
        ("v_proj", {"o_proj"}),
        ("up_proj", {"down_proj"}),
    ],
    # Gains are stored less 1.
    "gemma2": [
        ("input_layernorm", QKV),
        ("pre_feedforward_layernorm", {"gate_proj", "up_proj"}),
        ("v_proj", {"o_proj"}),
        ("up_proj", {"down_proj"}),
    ],
    # Attention and MLP side by side.
    "phi": [("input_layernorm", {*QKV, "fc1"}), ("v_proj", {"dense"})],
    # One layer makes queries, keys and values, another gates and ups.
    "phi3": [
        ("input_layernorm", {"qkv_proj"}),
        ("post_attention_layernorm", {"gate_up_proj"}),
        ("qkv_proj", {"o_proj"}),
        ("gate_up_proj", {"down_proj"}),
    ],
    # Conv1D.
    "gpt2": [("ln_1", {"c_attn"}), ("ln_2", {"c_fc"}), ("c_attn", {"c_proj"})],
    # Each head's query, key and value beside each other; in Falcon, those of a group of heads.
    "gpt_neox": [
        ("input_layernorm", {"query_key_value"}),
        ("post_attention_layernorm", {"dense_h_to_4h"}),
        ("query_key_value", {"dense"}),
    ],
    "falcon": [("ln_attn", {"query_key_value"}), ("ln_mlp", {"dense_h_to_4h"}), ("query_key_value", {"dense"})],
    # ReLU lets scales pass.
    "opt": [
        ("self_attn_layer_norm", QKV),
        ("final_layer_norm", {"fc1"}),
        ("v_proj", {"out_proj"}),
        ("fc1", {"fc2"}),
    ],
    # Norms' outputs are residuals too.
    "bert": [("value", {"dense"})],
    # The router, which stays in float, experts, and those that all tokens take.
    "qwen2_moe": [
        ("input_layernorm", QKV),
        ("post_attention_layernorm", {"gate", "experts", "shared_expert_gate", "gate_proj", "up_proj"}),
        ("v_proj", {"o_proj"}),
        ("up_proj", {"down_proj"}),
    ],
    # Latent attention.
    "deepseek_v3": [
        ("input_layernorm", {"q_a_proj", "kv_a_proj_with_mqa"}),
        ("q_a_layernorm", {"q_b_proj"}),
        ("kv_a_layernorm", {"kv_b_proj"}),
        ("kv_b_proj", {"o_proj"}),
        ("post_attention_layernorm", {"gate", "experts", "gate_proj", "up_proj"}),
        ("up_proj", {"down_proj"}),
    ],
}


@pytest.mark.parametrize("family", EXPECTED)
def test_folds_of(family: str) -> None:
    example, block = build(family)
    before = {name: value.clone() for name, value in example.model.state_dict().items()}
    folds, refused = find_folds(block)
    assert all(torch.equal(value, before[name]) for name, value in example.model.state_dict().items())
    last = [ends(fold) for fold in folds if ".1." in fold.source]
    assert sorted(last, key=str) == sorted(EXPECTED[family], key=str)
    folded = {name for fold in folds for name in fold.layers}
    assert set(refused) == set(block.layers) - folded


def rescale(block: Block, scales: Callable[[int], Tensor]) -> None:
    for fold in find_folds(block)[0]:
        K = input_weights(block.model.get_submodule(fold.layers[0]))[0].shape[-1]
        fold.apply(block, fold.tie(scales(K)))


@pytest.mark.parametrize("family", [*EXPECTED, "t5", "whisper", "gpt_oss"])
def test_folds_change_nothing_but_rounding(family: str) -> None:
    example, block = build(family)
    expected = example.output()
    rescale(block, lambda K: torch.empty(K).uniform_(0.3, 3.0))
    # Measured: up to 3e-6.
    assert (example.output() - expected).norm() < 2e-5 * expected.norm()


@pytest.mark.parametrize("family", ["llama", "falcon", "gpt2", "gpt_neox", "phi3"])
def test_powers_of_two_keep_the_bits(family: str) -> None:
    example, block = build(family)
    expected = example.output()
    rescale(block, lambda K: 2.0 ** torch.randint(-3, 4, (K,)))
    assert torch.equal(example.output(), expected)


def test_transposed_experts_take_scales() -> None:
    example, block = build("gpt_oss")
    expected = example.output()
    layer = "model.layers.1"
    fold = Fold(f"{layer}.post_attention_layernorm", (f"{layer}.mlp.router", f"{layer}.mlp.experts"))
    weight = example.model.get_parameter(f"{layer}.mlp.experts.gate_up_proj").detach().clone()
    scales = 2.0 ** torch.randint(-3, 4, (64,))
    fold.apply(block, scales)
    # [E, K, N].
    assert torch.equal(example.model.get_parameter(f"{layer}.mlp.experts.gate_up_proj"), weight * scales[:, None])
    assert torch.equal(example.output(), expected)


def test_inputs_are_divided_and_columns_multiplied() -> None:
    _, block = build("opt")
    fold = next(fold for fold in find_folds(block)[0] if fold.source.endswith("layers.0.final_layer_norm"))
    scales = torch.empty(64).uniform_(0.5, 2.0)
    weight = linear_weight(block.layers[fold.layers[0]].module).detach().clone()
    (before,) = block.collect(fold.layers).values()
    fold.apply(block, scales)
    (after,) = block.collect(fold.layers).values()
    torch.testing.assert_close(after.channel_amax, before.channel_amax / scales)
    torch.testing.assert_close(linear_weight(block.layers[fold.layers[0]].module), weight * scales)


def test_columns_of_one_value_head_share_their_scale() -> None:
    _, block = build("llama")
    fold = next(fold for fold in find_folds(block)[0] if fold.source.endswith("layers.0.self_attn.v_proj"))
    # Four heads of 16 in two groups: columns 0 and 16 are both of value channel 0, columns 32 and 48 of 16.
    values = torch.arange(64.0)
    tied = fold.tie(values)
    assert tied[[0, 16, 32, 48]].tolist() == [16, 16, 48, 48]
    with pytest.raises(ValueError, match="v_proj' has different scales where it is used twice"):
        fold.apply(block, values + 1)


def test_half_precision_gains_stored_less_one() -> None:
    example, _ = build("gemma2")
    model: Any = example.model.bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(-0.5, 0.5)
    model.float()  # so that weights alone are rounded
    expected = example.output()
    block = block_of(model.bfloat16(), example.inputs)
    folds, refused = find_folds(block)
    assert not refused
    # As a rounded gain was divided by another number than was asked for, columns are multiplied by that.
    for fold in folds:
        if fold.gain_offset:
            fold.apply(block, torch.empty(64).uniform_(4, 50))
    model.float()
    assert (example.output() - expected).norm() < 0.005 * expected.norm()


def test_refusals_name_what_is_ahead() -> None:
    _, block = build("gpt2")
    assert find_folds(block)[1]["transformer.h.0.mlp.c_proj"] == (
        "scales in 'transformer.h.0.mlp.c_fc' don't verifiably keep what the block computes"
    )
    _, block = build("bert")
    assert find_folds(block)[1]["bert.encoder.layer.0.intermediate.dense"] == (
        "scales in 'bert.encoder.layer.0.attention.output.LayerNorm' don't verifiably keep what the block computes"
    )
    _, block = build("olmo2")
    assert find_folds(block)[1]["model.layers.0.self_attn.q_proj"] == (
        "nothing that is known to take scales makes its input"
    )


def test_what_a_block_returns_beside_its_first_tensor_counts() -> None:
    # Cross attention's keys and values are of the encoder's last hidden state, which the model returns too.
    _, block = build("t5")
    assert "encoder.final_layer_norm" in find_folds(block)[1]["decoder.block.0.layer.1.EncDecAttention.k"]


class Logits(nn.Module):
    """Those of ``model`` alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(**inputs).logits
        return logits


def test_what_never_shows_is_not_verified() -> None:
    # The vision tower's last layer but one is what the language model gets.
    example = FAMILIES["llava"]()
    folds, refused = find_folds(block_of(Logits(example.model), example.inputs))
    tower = "model.model.vision_tower.encoder.layers"
    assert any(fold.source == f"{tower}.0.layer_norm1" for fold in folds)
    assert f"scales in '{tower}.1.layer_norm1' don't verifiably keep" in refused[f"{tower}.1.self_attn.q_proj"]


class Hidden(nn.Module):
    """What follows the norm is partly out of sight: a weight that the block itself multiplies by."""

    def __init__(self, seen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        second = self.second(h) if self.seen else F.linear(h, self.second.weight, self.second.bias)
        out: Tensor = x + self.first(h) + second
        return out


def test_a_consumer_out_of_sight_refuses_the_fold() -> None:
    x = {"x": torch.randn(4, 32)}
    folds, refused = find_folds(block_of(Hidden(True), x))
    assert [ends(fold) for fold in folds] == [("norm", {"first", "second"})]
    assert not refused
    folds, refused = find_folds(block_of(Hidden(False), x))
    assert not folds
    assert refused["first"] == "scales in 'norm' don't verifiably keep what the block computes"


class Limited(nn.Module):
    """An MLP that limits its ups, to more than a few tokens show."""

    def __init__(self, limit: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(32, 64, dtype=dtype), nn.Linear(64, 32, dtype=dtype)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down_proj(self.up_proj(x).clamp(-self.limit, self.limit))
        return out


# With values of up to 3, and up to 60,000 that are near the largest one of float16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("limit", "size"), [(16.0, 1.0), (torch.inf, 1.0), (torch.inf, 2e4)])
def test_a_limit_that_the_batch_does_not_reach_refuses_the_fold(limit: float, size: float, dtype: torch.dtype) -> None:
    model, x = Limited(limit, dtype), torch.randn(4, 32, dtype=dtype)
    with torch.no_grad():
        model.up_proj.weight.mul_(size)
    folds, refused = find_folds(block_of(model, {"x": x}))
    if limit == torch.inf:
        assert [ends(fold) for fold in folds] == [("up_proj", {"down_proj"})]
    else:
        assert not folds
        assert refused["down_proj"] == "scales in 'up_proj' don't verifiably keep what the block computes"


@pytest.mark.parametrize("size", [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_so_small_that_an_activation_is_linear(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(fc1=nn.Linear(32, 64), act=nn.GELU(), fc2=nn.Linear(64, 32))).to(dtype)
    with torch.no_grad():
        for parameter in model.fc1.parameters():
            parameter.mul_(size)
    assert not find_folds(block_of(model, {"input": torch.randn(64, 32, dtype=dtype)}))[0]


def test_a_token_of_large_values_does_not_hide_the_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(fc1=nn.Linear(32, 64), act=nn.GELU(), fc2=nn.Linear(64, 32)))
    x = torch.randn(8, 32)
    x[0] *= 3000  # beside which GELU is ReLU
    assert not find_folds(block_of(model, {"input": x}))[0]


def test_values_of_an_attention_that_limits_them_take_no_scales() -> None:
    example = language_model("OlmoForCausalLM", **SMALL, clip_qkv=8.0)()
    folds, refused = find_folds(block_of(example.model, example.inputs))
    assert {ends(fold)[0] for fold in folds} == {"up_proj"}
    assert "don't verifiably keep" in refused["model.layers.0.self_attn.o_proj"]


class Sides(nn.Module):
    """A layer of its own for some tokens, of which a batch may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.text, self.vision = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, is_image: Tensor) -> Tensor:
        h = self.norm(x)
        return x + (torch.where(is_image, self.vision(h), self.text(h)) if is_image.any() else self.text(h))


def test_a_layer_that_the_batch_does_not_reach_refuses_the_fold() -> None:
    text, both = torch.zeros(4, 1, dtype=torch.bool), torch.tensor([[False], [True], [True], [False]])
    x, model = torch.randn(4, 32), Sides()
    assert [ends(fold) for fold in find_folds(block_of(model, {"x": x, "is_image": both}))[0]] == [
        ("norm", {"text", "vision"})
    ]
    folds, refused = find_folds(block_of(model, {"x": x, "is_image": text}, {"x": x, "is_image": both}))
    assert not folds
    assert refused["text"] == "'vision' may take what 'norm' returns, and the first batch doesn't reach it"


class Values(nn.Module):
    """As an attention whose values later layers take from a dictionary, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.v_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, shared: dict[str, Tensor] | None = None) -> Tensor:
        v = self.v_proj(x)
        if shared is not None:
            shared["values"] = v
        out: Tensor = x + self.o_proj(v)
        return out


def test_values_that_are_handed_on_take_no_scales() -> None:
    block = block_of(Values(), {"x": torch.randn(4, 32)})
    assert [ends(fold) for fold in find_folds(block)[0]] == [("v_proj", {"o_proj"})]
    block.calls = [Call((), {"x": torch.randn(4, 32), "shared": {}})]
    folds, refused = find_folds(block)
    assert not folds
    assert refused["o_proj"] == "scales in 'v_proj' don't verifiably keep what the block computes"


def test_a_consumer_that_is_quantized_already_refuses_the_fold() -> None:
    model = Hidden(True)
    model.second = QuantLinear.from_linear(model.second)  # type: ignore[assignment]
    layers = {"first": LayerWork("first", model.first, SCHEMES["int8"])}
    folds, refused = find_folds(Block("", model, model, layers, [Call((torch.randn(4, 32),))]))
    assert not folds
    assert refused["first"] == "scales in 'norm' don't verifiably keep what the block computes"


def test_what_is_shared_with_another_block_is_refused() -> None:
    model = nn.Sequential(Hidden(True), Hidden(True))
    x = torch.randn(4, 32)
    block = Block("0", model[0], model, block_of(model, {"input": x}).layers, [Call((x,))])
    block.layers = {name: work for name, work in block.layers.items() if name.startswith("0.")}
    assert len(find_folds(block)[0]) == 1
    model[1].norm.weight = model[0].norm.weight
    folds, refused = find_folds(block)
    assert not folds
    assert refused["0.first"] == "'0.norm' or a layer after it is shared with '1.norm', outside the block"


def test_a_block_whose_name_begins_as_this_ones_is_another() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Hidden(True) for _ in range(11))})
    works = {name: work for name, work in block_of(model).layers.items() if name.startswith("layers.1.")}
    block = Block("layers.1", model.get_submodule("layers.1"), model, works, [Call((torch.randn(4, 32),))])
    assert len(find_folds(block)[0]) == 1
    model.get_submodule("layers.10").norm = model.get_submodule("layers.1").norm
    folds, refused = find_folds(block)
    assert not folds
    assert refused["layers.1.first"].endswith("is shared with 'layers.10.norm', outside the block")


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.inf, torch.nan])
def test_scales_must_be_positive(bad: float) -> None:
    block = block_of(Hidden(True), {"x": torch.randn(4, 32)})
    with pytest.raises(ValueError, match="scales of the output of 'norm' must be finite and greater than 0"):
        Fold("norm", ("first", "second")).apply(block, torch.tensor([1.0] * 31 + [bad]))


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = Hidden(True).half()
    block = block_of(model, {"x": torch.randn(4, 32)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"weight of 'first' is too large for torch\.float16"):
        Fold("norm", ("first", "second")).apply(block, torch.full((32,), 1e7))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_without_data_nothing_is_folded() -> None:
    block = block_of(Hidden(True))
    folds, refused = find_folds(block)
    assert not folds
    assert refused == dict.fromkeys(["first", "second"], "there is no calibration data to verify a fold with")
