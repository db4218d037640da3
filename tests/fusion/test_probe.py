"""Norms and activations of models are found by their numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from qgemm.fusion.probe import (
    find_activation,
    find_norm,
    find_rotation,
    find_router,
    find_scale,
    find_scaled_router,
    passes_on,
)
from qgemm.kernels.activations import ACTIVATIONS
from qgemm.kernels.norms import NORMS, Norm
from qgemm.kernels.routing import Routing
from qgemm.nn.blocks.attention import Rotation
from tests.operators import operators


class _Norm(nn.Module):
    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.weight, self.eps, self.norm = nn.Parameter(torch.ones(64)), norm.eps, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, self.weight)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("kind", NORMS)
def test_each_norm_is_found(kind: str, eps: float) -> None:
    assert find_norm(_Norm(Norm(kind, eps))) == Norm(kind, eps)


def test_a_norm_of_channels_is_none_of_them() -> None:
    """It has the bits of a layer norm for rows alone."""
    assert find_norm(nn.GroupNorm(1, 64)) is None


def test_norms_of_models() -> None:
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    norms: dict[Any, str] = {
        LlamaRMSNorm(64): "rms",
        Olmo2RMSNorm(64): "rms_once",
        GemmaRMSNorm(64): "rms_plus_one",
        CohereLayerNorm(64): "layer",
        NemotronLayerNorm1P(64): "layer_plus_one",
        nn.LayerNorm(64): "layer",
        nn.LayerNorm(64, bias=False): "layer",
    }
    for module, kind in norms.items():
        found = find_norm(module.to("meta"))
        assert found is not None, module
        assert found.kind == kind, module


def test_what_is_no_known_norm() -> None:
    other = _Norm(Norm("rms"))
    other.eps = 1e-2  # says something else than it does
    assert find_norm(other) is None
    assert find_norm(nn.LayerNorm(64, elementwise_affine=False)) is None
    assert find_norm(nn.LayerNorm((8, 8))) is None
    assert find_norm(nn.Identity()) is None
    another = _Norm(Norm("rms"))
    another.register_buffer("scale", torch.ones(64))  # which a few may read
    assert find_norm(another) is None


class _Times(nn.Module):
    def __init__(self, more: float) -> None:
        super().__init__()
        self.gamma, self.more = nn.Parameter(torch.ones(64)), more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.gamma + self.more)


def test_layer_scales() -> None:
    from transformers.models.dinov2.modeling_dinov2 import Dinov2Config, Dinov2LayerScale

    assert find_scale(Dinov2LayerScale(Dinov2Config(hidden_size=64))) == "lambda1"
    assert find_scale(_Times(0).to("meta")) == "gamma"
    for module in (_Times(1), nn.LayerNorm(64), nn.PReLU(64), nn.Linear(8, 8)):
        assert find_scale(module) == ""


def test_what_does_nothing() -> None:
    from transformers.models.beit.modeling_beit import BeitDropPath

    for module in (nn.Identity(), nn.Dropout(0.5), BeitDropPath(0.5)):
        assert passes_on(module)
    for module in (nn.ReLU(inplace=True), nn.Hardtanh(-20, 20, inplace=True), nn.GELU(), nn.Linear(4, 4)):
        assert not passes_on(module)


def test_activations_are_found() -> None:
    from transformers.activations import ACT2FN

    for name, activation in ACTIVATIONS.items():
        assert find_activation(activation) == name
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}
    assert {name: find_activation(ACT2FN[name]) for name in names} == names
    for name in ("relu6", "gelu_10", "mish", "laplace"):  # the first two limit few values
        assert find_activation(ACT2FN[name]) == ""
    assert find_activation(nn.Tanh()) == ""
    assert find_activation(nn.Bilinear(2, 2, 2)) == ""
    assert find_activation(nn.PReLU(init=0)) == ""  # a ReLU until it is trained


def test_activations_with_more_roundings_are_found() -> None:
    from transformers.activations import ACT2FN

    names = dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh")
    names |= {"gelu_python": "gelu", "quick_gelu": "quick_gelu"}
    x = torch.randn(4096).mul(3).bfloat16()
    for name, known in names.items():
        assert find_activation(ACT2FN[name]) == known, name
        exact = ACTIVATIONS[known](x.double())
        own, ours = ((act(x).double() - exact).square().mean() for act in (ACT2FN[name], ACTIVATIONS[known]))
        assert ours < own
    # Something else, though close to it; and the same, but less exact than roundings explain.
    near = {
        "another constant": lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.0448 * x**3))),
        "a limit": lambda x: ACT2FN["gelu_new"](x).clamp(max=64),
        "in 8 bits": lambda x: ACT2FN["gelu_new"](x) if x.dtype == torch.float64 else x.to(torch.float8_e5m2).to(x),
        "in place": lambda x: x.mul_(torch.sigmoid(1.702 * x)).mul_(1.01),
        "another dtype": lambda x: ACT2FN["gelu_new"](x).float(),
    }
    assert {name: find_activation(each) for name, each in near.items()} == dict.fromkeys(near, "")


def test_rotations_of_models() -> None:
    from transformers.models.cohere import modeling_cohere as cohere
    from transformers.models.glm import modeling_glm as glm
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.llama import modeling_llama as llama

    angles = torch.arange(5)[None, :, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    twice, side_by_side = torch.cat([angles, angles], -1), angles.repeat_interleave(2, -1)
    found = {
        module.__name__.rpartition("_")[2]: find_rotation(
            module.apply_rotary_pos_emb, positions.cos(), positions.sin(), None, torch.float32
        )
        for module, positions in ((llama, twice), (cohere, side_by_side), (glm, twice), (gpt_oss, angles))
    }
    assert found == {
        "llama": Rotation(False, "half", False),
        "cohere": Rotation(True, "other", True),
        "glm": Rotation(True, "half", False),
        "oss": Rotation(False, "all", False),
    }
    # Of the first columns alone, in float32 with one rounding.
    cos, sin = (values.to(torch.float64).float() for values in (twice.cos(), twice.sin()))
    assert find_rotation(llama.apply_rotary_pos_emb, cos, sin, 8, torch.bfloat16) is None  # which gives float32
    assert find_rotation(llama.apply_rotary_pos_emb, cos, sin, 8, torch.float32) == Rotation(False, "half", False)


def test_what_is_no_known_rotation() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angles = torch.arange(5)[None, :, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    cos, sin = (torch.cat([values, values], -1) for values in (angles.cos(), angles.sin()))

    def backwards(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos, -sin)

    assert find_rotation(backwards, cos, sin, None, torch.float32) is None
    assert find_rotation(apply_rotary_pos_emb, cos[None], sin[None], None, torch.float32) is None


class _Router(nn.Module):
    """With a bias of the choice, where ``bias`` says whose it is."""

    def __init__(self, routing: Routing, factor: float = 1.0, in_float: bool = False, bias: str = "") -> None:
        super().__init__()
        self.weight, self.top_k, self.routing, self.factor = nn.Parameter(torch.ones(12, 32)), 3, routing, factor
        self.in_float = in_float
        self.num_group, self.topk_group = routing.groups, routing.kept_groups
        self.routed_scaling_factor, self.norm_min = routing.scale, routing.floor
        if bias == "its own":
            self.expert_bias = nn.Buffer(torch.zeros(12))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        bias = getattr(self, "expert_bias", bias)
        logits = x.float() @ self.weight.float().t() if self.in_float else x @ self.weight.t()
        weights, index = self.routing(logits, bias)
        return logits, (weights if self.routing.in_float else weights.to(x.dtype)) * self.factor, index


def _in_mixture(router: nn.Module, told: bool = False) -> nn.Module:
    mixture = nn.Module()
    mixture.gate = router
    if told:
        mixture.e_score_correction_bias = nn.Buffer(torch.zeros(12))
    return mixture


_SIGMOID = Routing(3, "sigmoid", in_float=True, scale=2.5, floor=1e-20)


@pytest.mark.parametrize("in_float", [False, True])
@pytest.mark.parametrize(
    ("routing", "bias"),
    [
        (Routing(3), ""),
        (Routing(3, normalized=False), ""),
        (Routing(3, in_float=True), ""),
        (Routing(3, normalized=False, in_float=True), ""),
        (Routing(3, "softmax_of_top_k"), ""),
        (Routing(3, "softmax_of_top_k", in_float=True), ""),
        (Routing(3, in_float=True, floor=1e-12), "its own"),
        (_SIGMOID, ""),
        (_SIGMOID, "its own"),
        (_SIGMOID, "told"),
        (replace(_SIGMOID, groups=3, kept_groups=2), "its own"),
        (replace(_SIGMOID, normalized=False, floor=0.0), "its own"),
        (Routing(3, "sigmoid_of_top_k"), ""),
    ],
    ids=str,
)
def test_each_routing_is_found(routing: Routing, bias: str, in_float: bool) -> None:
    router = _Router(routing, in_float=in_float, bias=bias)
    mixture = _in_mixture(router, bias == "told")
    found = find_router(router, mixture)
    # Of some logits that float32 changes nothing about, the formulas are one.
    assert found.routing == routing
    assert found.in_float == in_float
    holder = {"": None, "its own": (router, "expert_bias"), "told": (mixture, "e_score_correction_bias")}[bias]
    assert (found.bias, found.told) == (holder, bias == "told")
    x = torch.randn(4, 32).bfloat16()
    router.bfloat16()
    told = [mixture.e_score_correction_bias] if bias == "told" else []
    assert all(map(torch.equal, found(x), router(x, *told)[1:]))
    router.register_forward_hook(lambda *_: None)  # who listens is heard
    assert all(map(torch.equal, found(x), router(x, *told)[1:]))


def test_what_is_no_known_routing() -> None:
    for router in (_Router(Routing(3), factor=2.0), nn.Linear(32, 12)):
        assert find_router(router, _in_mixture(router)).routing is None


def test_biases_below_zero_show_what_becomes_of_groups_that_are_left_out() -> None:
    """A.X-K2 sets the scores of their experts to 0, which is more than a negative one."""
    from transformers import AXK2Config
    from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter

    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    router: Any = AXK2TopkRouter(AXK2Config(hidden_size=32, num_experts_per_tok=2, **groups))
    with torch.no_grad():
        router.weight.normal_()
        router.e_score_correction_bias.fill_(-2)
    found, x = find_router(router, _in_mixture(router)), torch.randn(6, 32)
    assert found.routing is None
    assert all(map(torch.equal, found(x), router(x)[1:]))


def test_a_router_may_return_its_logits_last() -> None:
    class Last(_Router):
        def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
            return super().forward(x, bias)[::-1]

    router = Last(Routing(3)).bfloat16()
    found = find_router(router, _in_mixture(router))
    assert found.routing == Routing(3)
    x = torch.randn(4, 32).bfloat16()
    router.register_forward_hook(lambda *_: None)
    assert all(map(torch.equal, found(x), router(x)[1::-1]))


def test_routers_of_models() -> None:
    from transformers import (
        DeepseekV3Config,
        GptOssConfig,
        HunYuanMoEV1Config,
        Lfm2MoeConfig,
        Llama4TextConfig,
        MixtralConfig,
        OlmoeConfig,
        PhimoeConfig,
        Qwen3MoeConfig,
    )
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
    from transformers.models.llama4.modeling_llama4 import Llama4Router
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    small: Any = {"hidden_size": 32, "num_experts_per_tok": 2}
    routers: dict[nn.Module, Routing | None] = {
        Qwen3MoeTopKRouter(Qwen3MoeConfig(**small, norm_topk_prob=True)): Routing(2),
        Qwen3MoeTopKRouter(Qwen3MoeConfig(**small, norm_topk_prob=False)): Routing(2, normalized=False),
        OlmoeTopKRouter(OlmoeConfig(**small)): Routing(2, normalized=False),
        MixtralTopKRouter(MixtralConfig(**small)): Routing(2, in_float=True),
        GptOssTopKRouter(GptOssConfig(**small)): Routing(2, "softmax_of_top_k"),
        DeepseekV3TopkRouter(DeepseekV3Config(**small)): Routing(
            2, "sigmoid", in_float=True, scale=2.5, floor=1e-20, groups=8, kept_groups=4
        ),
        PhimoeTopKRouter(PhimoeConfig(**small)): Routing(2, "sparsemixer", margin=0.02),
        HunYuanMoEV1Gate(HunYuanMoEV1Config(hidden_size=32, num_experts=8, moe_topk=2)): Routing(2),
        Llama4Router(Llama4TextConfig(hidden_size=32, num_local_experts=8)): Routing(1, "sigmoid_of_top_k"),
        Lfm2MoeTopKRouter(Lfm2MoeConfig(**small, use_expert_bias=False)): Routing(
            2, "sigmoid", offset=1e-6, rounded=True
        ),
    }
    assert {router: find_router(router, _in_mixture(router)).routing for router in routers} == routers


def test_the_router_of_gemma4() -> None:
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

    router: Any = Gemma4TextRouter(Gemma4TextConfig(hidden_size=32, num_experts=8, top_k_experts=2)).bfloat16()
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.rand(parameter.shape))
    found, x = find_scaled_router(router), torch.randn(6, 32).bfloat16()
    assert found is not None
    assert all(map(torch.equal, found(x), router(x)[1:]))
    assert operators(found, x)[:3] == ["qgemm.add_norm", "aten.mm", "qgemm.route"]
    assert find_scaled_router(nn.Linear(32, 8)) is None
    router.norm.eps = 0.5
    found = find_scaled_router(router)
    assert found is not None
    assert found.norm.eps == 0.5
