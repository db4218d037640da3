"""``QuantExperts``: the same function as the float modules it replaces, in every layout, and values that stay."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families.experts import ALL, HIDDEN, INTERMEDIATE, ROUTED, E, inputs
from torch import Tensor, nn

from qgemm.kernels import GPT_OSS, GatedActivation
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.kernels.reference import (
    experts_reference,
    quantize_rows_reference,
    weight_only_experts_reference,
)
from qgemm.nn import QuantExperts, linear_class
from qgemm.nn.experts import QuantSortedExperts
from qgemm.nn.float_experts import UnknownExperts, describe_experts
from qgemm.numerics.formats import INT8

Build = Callable[[], nn.Module]
families = pytest.mark.parametrize("build", ALL.values(), ids=ALL)
routed = pytest.mark.parametrize("build", ROUTED.values(), ids=ROUTED)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


def relative_error(out: Tensor, wanted: Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


# What it computes


@families
def test_output_is_close_to_the_float_module(build: Build, device: torch.device) -> None:
    module = build()
    layer = QuantExperts.from_experts(module).to(device)
    with torch.no_grad():
        wanted = module(*inputs(module, 33))
        out = layer(*(x.to(device) for x in inputs(layer, 33)))
    assert out.shape == wanted.shape
    assert out.dtype == wanted.dtype
    # Two int8 products err by about 1 % each. Rows in another order, or another activation, err by 50 % and more.
    assert 0 < relative_error(out.cpu(), wanted) < 0.03


@routed
@DTYPES
def test_output_is_that_of_the_specification(build: Build, dtype: torch.dtype, device: torch.device) -> None:
    layer = QuantExperts.from_experts(build().to(dtype)).to(device)
    x, index, weights = (t.to(device) for t in inputs(layer, 9, dtype))
    first = [layer.stored(f"gate_up_proj{end}") for end in ("", "_scale", "_bias")]
    second = [layer.stored(f"down_proj{end}") for end in ("", "_scale", "_bias")]
    wanted = experts_reference(x, index, weights, ExpertWeights(*first, *second, layer.activation))
    out = layer(x, index, weights)
    assert out.dtype == dtype
    assert relative_error(out, wanted) < 4 * torch.finfo(dtype).eps + 1e-6


@families
def test_the_dtype_under_autocast_is_that_of_the_float_experts(build: Build, device: torch.device) -> None:
    module = build().to(device)
    layer = QuantExperts.from_experts(module)
    arguments = [t.to(device) for t in inputs(layer, 9)]
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.no_grad():
        out, wanted = layer(*arguments), module(*arguments)
    assert out.dtype == wanted.dtype
    assert relative_error(out, wanted.float()) < 0.05


def test_scales_are_checked_as_they_are_loaded() -> None:
    state = QuantExperts.from_experts(ALL["gpt_oss"]()).state_dict()
    layer = QuantExperts.from_experts(ALL["gpt_oss"]())
    for name in layer.scale_names:
        bad = state[name].clone()
        bad[1, 2] = -1
        with pytest.raises(RuntimeError, match=f"{name} holds NaN, Inf or a negative number"):
            layer.load_state_dict({**state, name: bad})


def test_experts_are_leaves_of_symbolic_tracing() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = QuantExperts(3, 8, 6)

        def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.experts(x, index, weights)

    nodes = list(torch.fx.symbolic_trace(Block()).graph.nodes)
    assert [(node.op, node.target) for node in nodes][3] == ("call_module", "experts")


@families
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(build: Build, tokens: int, device: torch.device) -> None:
    layer = QuantExperts.from_experts(build()).to(device)
    out = layer(*(x.to(device) for x in inputs(layer, tokens)))
    assert out.shape == inputs(layer, tokens)[0].shape
    assert out.isfinite().all()


def test_experts_that_are_elsewhere_contribute_nothing(device: torch.device) -> None:
    layer = QuantExperts.from_experts(ALL["gpt_oss"]()).to(device)
    x, index, weights = (t.to(device) for t in inputs(layer, 9))
    alone = layer(x, index[:, :1], weights[:, :1])
    for elsewhere in (E, -1):
        other = index.clone()
        other[:, 1] = elsewhere
        assert torch.equal(layer(x, other, weights), alone)
    assert torch.equal(layer(x, index.int(), weights), layer(x, index, weights))


def test_rows_of_zeros_of_sorted_experts_are_zeros(device: torch.device) -> None:
    layer = QuantExperts.from_experts(ALL["llama4"]()).to(device)
    assert type(layer) is QuantSortedExperts
    (x,) = (t.to(device) for t in inputs(layer, 9))
    out = layer(x)
    assert not out[(x == 0).all(-1)].any()
    # One of negative values is none of zeros.
    below = layer(-x.abs())
    assert below[(x != 0).any(-1)].any(-1).all()
    # A damaged row is seen.
    x[0, 3] = torch.nan
    assert layer(x)[0].isnan().all()
    with pytest.raises(ValueError, match="hidden_states has 7 rows; it must have as many for each of the 4 experts"):
        layer(x[:7])


# Schemes

EXPERT_SCHEMES = ["int4", "int4-32-asymmetric", "int4-channel", "mxfp4", "mxfp8", "nvfp4", "nf4", "int8-weight"]
EXPERT_SCHEMES += ["bnb-fp4", "int4-32-float-zeros", "int4-32-float-zeros+int8-weight-16"]
FP8_SCHEMES = ["fp8", "fp8-block"]
families_and_schemes = pytest.mark.parametrize(
    ("family", "scheme"),
    [*(("gpt_oss", each) for each in (*EXPERT_SCHEMES, *FP8_SCHEMES)), ("llama4", "nvfp4"), ("nemotron_h", "mxfp4")],
)


@families_and_schemes
def test_weights_are_those_of_linear_layers(family: str, scheme: str) -> None:
    module = ALL[family]()
    source = describe_experts(module)
    layer = QuantExperts.from_experts(module, scheme)
    found = layer.dequantize(torch.float32)
    for name in layer.weight_names:
        for expert in range(E):
            rows = source.rows_of(name, module.get_parameter(source.parameters[name]).detach(), expert)
            linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
            linear.weight.data = rows
            own = layer.scheme.of(name)
            wanted = linear_class(own).from_linear(linear, own).dequantize(torch.float32).weight
            assert torch.equal(found[name][expert], wanted)


@families_and_schemes
def test_output_is_that_of_the_dequantized_module(family: str, scheme: str, device: torch.device) -> None:
    module = ALL[family]().to(device)
    layer = QuantExperts.from_experts(module, scheme)
    source = describe_experts(module)
    for name, value in layer.dequantize(torch.float32).items():
        module.get_parameter(source.parameters[name]).data = source.restore(name, value)
    with torch.no_grad():
        wanted, out = (each(*(x.to(device) for x in inputs(layer, 33))) for each in (module, layer))
    # Rows in fp8 err by 3 % before either product; those in float by nothing but the order of sums.
    assert relative_error(out, wanted) < (0.06 if scheme in FP8_SCHEMES else 1e-5)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        *((each, torch.bfloat16) for each in (*EXPERT_SCHEMES, *FP8_SCHEMES)),
        ("mxfp4", torch.float16),
        ("int4-32-asymmetric", torch.float32),
        ("fp8-block", torch.float16),
    ],
)
def test_output_is_that_of_the_specification_in_every_scheme(
    scheme: str, dtype: torch.dtype, device: torch.device
) -> None:
    layer = QuantExperts.from_experts(ALL["gpt_oss"]().to(dtype), scheme).to(device)
    x, index, weights = (t.to(device) for t in inputs(layer, 9, dtype))
    out = layer(x, index, weights)
    parts = [[layer.stored(f"{name}{end}") for end in _ENDS] for name in layer.weight_names]
    if scheme in FP8_SCHEMES:
        operands = [(weight, scale, bias) for weight, scale, _, _, bias in parts]
        wanted = experts_reference(x, index, weights, ExpertWeights(*operands[0], *operands[1], layer.activation))
    else:
        forms = [(part.weight.dtype, part.weight.group_size or 0) for part in layer.scheme.parts]
        packed = WeightOnlyExperts(*parts[0], *parts[1], layer.activation, *forms[0], *forms[1])
        wanted = weight_only_experts_reference(x, index, weights, packed)
    assert out.dtype == dtype
    # A value of fp8 that is rounded the other way changes a row by a thousandth.
    assert relative_error(out, wanted) < 6 * torch.finfo(dtype).eps + (3e-3 if scheme in FP8_SCHEMES else 1e-6)


_ENDS = ("", "_scale", "_zero_point", "_global_scale", "_bias")


@pytest.mark.parametrize(
    "scheme", ["mxfp4", "nvfp4+int8-weight", "int4-32-asymmetric", "int8-weight-float-zeros", "fp8-block"]
)
def test_a_state_dict_brings_every_scheme_back(scheme: str) -> None:
    module = ALL["gpt_oss"]()
    layer = QuantExperts.from_experts(module, scheme)
    loaded = QuantExperts.like(module, describe_experts(module), scheme).to_empty(device="cpu")
    loaded.load_state_dict(layer.state_dict())
    arguments = inputs(layer, 9)
    assert torch.equal(loaded(*arguments), layer(*arguments))
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in layer.state_dict().items())
    cast = copy.deepcopy(layer).to(torch.bfloat16)
    assert {name: value.dtype for name, value in cast.named_parameters() if not name.endswith("bias")} == {
        name: value.dtype for name, value in layer.named_parameters() if not name.endswith("bias")
    }


def test_scales_of_other_dtypes_are_kept() -> None:
    layer = QuantExperts.from_experts(ALL["gpt_oss"](), "int4")
    state = {name: value.half() if name.endswith("scale") else value for name, value in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert layer.down_proj_scale.dtype == torch.float16
    state["down_proj_scale"][0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="down_proj_scale holds NaN or Inf"):
        layer.load_state_dict(state)


def test_decided_weights_of_groups_are_taken() -> None:
    module = ALL["gpt_oss"]()
    source = describe_experts(module)
    layer = QuantExperts.like(module, source, "int4-32")
    values = torch.randint(-8, 8, (E, HIDDEN, INTERMEDIATE), dtype=torch.int8)
    scale = (torch.rand(E, HIDDEN, 2) + 0.5).bfloat16().float()
    layer.fill("down_proj", module.down_proj, source, (values, scale))
    assert torch.equal(layer.down_proj_scale, scale.bfloat16())
    wanted = values * scale.repeat_interleave(32, 2)[..., :INTERMEDIATE]
    found = torch.stack([layer.linear_of("down_proj", each).dequantize().weight for each in range(E)])
    assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match=r"weight's scale is torch\.float32"):
        layer.fill("down_proj", module.down_proj, source, (values, scale[..., :1]))


# From float modules


@families
def test_weights_are_those_of_the_float_module(build: Build) -> None:
    module = build()
    before = copy.deepcopy(module.state_dict())
    source = describe_experts(module)
    layer = QuantExperts.from_experts(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    for name, values in layer.dequantize().items():
        theirs = module.get_parameter(source.parameters[name])
        back = source.restore(name, values)
        assert back.shape == theirs.shape
        if name.endswith("bias"):
            assert torch.equal(back, theirs)
        else:
            scale = theirs.detach().abs().amax() / INT8.steps
            assert (back - theirs).abs().max() <= scale
    # Each expert's rows are quantized as a linear layer's would be.
    rows = source.rows_of("gate_up_proj", module.get_parameter(source.parameters["gate_up_proj"]).detach(), 2)
    q, row_scale = quantize_rows_reference(rows)
    assert torch.equal(layer.gate_up_proj[2], q)
    assert torch.equal(layer.gate_up_proj_scale[2], row_scale)


def test_gates_come_before_ups() -> None:
    module = ALL["gpt_oss"]()
    layer = QuantExperts.from_experts(module)
    floats = layer.dequantize()
    weight, bias = module.gate_up_proj.detach(), module.gate_up_proj_bias.detach()
    assert torch.equal(floats["gate_up_proj_bias"][:, :INTERMEDIATE], bias[:, ::2])
    assert torch.equal(floats["gate_up_proj_bias"][:, INTERMEDIATE:], bias[:, 1::2])
    assert torch.allclose(floats["gate_up_proj"][:, :INTERMEDIATE], weight[..., ::2].transpose(1, 2), atol=0.01)
    assert floats["gate_up_proj"].shape == (E, 2 * INTERMEDIATE, HIDDEN)
    assert layer.dequantize(torch.bfloat16)["down_proj"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "activation"),
    [
        ("mixtral", GatedActivation("silu")),
        ("qwen3_moe_gelu", GatedActivation("gelu_tanh")),
        ("deepseek_v4", GatedActivation("silu", limit=10.0)),
        ("gpt_oss", GPT_OSS),
        ("openai_privacy_filter", GPT_OSS),
        ("nemotron_h", GatedActivation("relu2", gated=False)),
    ],
)
def test_the_activation_is_found(family: str, activation: GatedActivation) -> None:
    assert QuantExperts.from_experts(ALL[family]()).activation == activation


def test_the_activation_is_found_whatever_the_defaults() -> None:
    module = ALL["qwen3_moe_gelu"]()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert describe_experts(module).activation == GatedActivation("gelu_tanh")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("act_fn", [nn.GELU(), nn.ReLU(), nn.GELU("tanh")], ids=str)
def test_activations_that_are_alike_are_told_apart(act_fn: nn.Module) -> None:
    module: Any = ALL["mixtral"]()
    module.act_fn = act_fn
    layer = QuantExperts.from_experts(module)
    wanted = {"GELU(approximate='none')": "gelu", "ReLU()": "relu", "GELU(approximate='tanh')": "gelu_tanh"}
    assert layer.activation.name == wanted[str(act_fn)]


def with_act_fn(module: Any, act_fn: Any) -> Any:
    del module.act_fn
    module.act_fn = act_fn
    return module


def with_a_norm(module: Any) -> Any:
    module.post_expert_norm = nn.LayerNorm(HIDDEN)
    return module


def with_a_norm_without_weights(module: Any) -> Any:
    module.has_post_expert_norm = True
    return module


def with_its_own_forward(module: Any) -> Any:
    class Scaled(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Tensor:
            return super().forward(*args) * 2  # type: ignore[no-any-return]

    module.__class__ = Scaled
    return module


def with_down_proj(module: Any, *shape: int) -> Any:
    module.down_proj = nn.Parameter(torch.zeros(E, *shape))
    return module


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda module: with_act_fn(module, nn.Mish()), "its activation isn't one that qgemm computes"),
        (lambda module: with_act_fn(module, nn.PReLU()), "it holds tensors that experts don't have (act_fn.weight)"),
        (lambda module: with_act_fn(module, lambda gate, up: gate), "its activation isn't one that qgemm computes"),
        (lambda module: with_act_fn(module, None), "it has no act_fn"),
        (with_a_norm, "it holds tensors that experts don't have (post_expert_norm.bias, post_expert_norm.weight)"),
        (with_a_norm_without_weights, "it has a norm after each expert"),
        (with_its_own_forward, "its layout of experts isn't one that qgemm knows"),
        (lambda module: with_down_proj(module, HIDDEN, INTERMEDIATE + 1), "the shapes of its weights don't match"),
        (lambda module: with_down_proj(module, HIDDEN + 1, INTERMEDIATE), "the shapes of its weights don't match"),
        (lambda module: nn.Linear(4, 4), "its layout of experts isn't one that qgemm knows"),
    ],
)
def test_modules_that_are_not_understood_are_refused(change: Any, reason: str) -> None:
    module = ALL["mixtral"]()
    if reason == "it has no act_fn":
        # Without the decorator's own gate function, which looks for it later.
        module._apply_gate = None  # type: ignore[assignment]
    with pytest.raises(UnknownExperts, match=f"^{re.escape(reason)}$"):
        QuantExperts.from_experts(change(module))


def test_nan_is_refused_by_expert() -> None:
    module: Any = ALL["gpt_oss"]()
    module.down_proj.data[2, 5, 3] = torch.nan
    with pytest.raises(ValueError, match=r"down_proj of expert 2 holds NaN or Inf.*can't be quantized"):
        QuantExperts.from_experts(module)


def test_a_static_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme 'int8-static' isn't supported for experts"):
        QuantExperts(2, 4, 4, scheme="int8-static")


def test_one_expert_at_a_time_is_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from qgemm.nn import linear

    shapes = []

    def recorded(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(rows.shape))
        return quantize_rows_reference(rows, dtype=dtype)

    monkeypatch.setattr(linear, "quantize_rows", recorded)
    QuantExperts.from_experts(ALL["llama4"]())
    assert shapes == [(2 * INTERMEDIATE, HIDDEN)] * E + [(HIDDEN, INTERMEDIATE)] * E


# State


def test_a_new_module(device: torch.device) -> None:
    layer = QuantExperts(3, 8, 6, GPT_OSS, bias=True, device=device, dtype=torch.bfloat16)
    assert {name: (tuple(p.shape), p.dtype) for name, p in layer.named_parameters()} == {
        "gate_up_proj": ((3, 12, 8), torch.int8),
        "gate_up_proj_scale": ((3, 12), torch.float32),
        "gate_up_proj_bias": ((3, 12), torch.bfloat16),
        "down_proj": ((3, 8, 6), torch.int8),
        "down_proj_scale": ((3, 8), torch.float32),
        "down_proj_bias": ((3, 8), torch.bfloat16),
    }
    assert not any(p.requires_grad for p in layer.parameters())
    assert not list(layer.buffers())
    plain = QuantExperts(3, 8, 6, GatedActivation("relu2", gated=False), device=device)
    assert plain.gate_up_proj.shape == (3, 6, 8)
    assert (plain.gate_up_proj_bias, plain.down_proj_bias) == (None, None)
    x, index = torch.randn(5, 8, device=device), torch.zeros(5, 2, dtype=torch.int64, device=device)
    assert plain(x, index, torch.ones(5, 2, device=device)).isnan().all(), "it never got any values"


def test_extra_repr() -> None:
    assert repr(QuantExperts(3, 8, 6)) == (
        "QuantExperts(num_experts=3, hidden_size=8, intermediate_size=6, activation=GatedActivation(name='silu', "
        "gated=True, limit=None, alpha=1.0, up_offset=0.0), bias=False, scheme='int8')"
    )


def assert_same(layer: nn.Module, other: nn.Module) -> None:
    ours, theirs = layer.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.cpu(), theirs[name].cpu()), name
    assert not any(p.requires_grad for p in other.parameters())


@pytest.mark.parametrize(
    "move",
    [
        lambda layer: layer.half().float(),
        lambda layer: layer.to(torch.bfloat16).to(torch.float32),
        lambda layer: layer.to("cpu"),
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
    ],
    ids=["half", "to", "device", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_values_survive(scheme: str, move: Any) -> None:
    layer = QuantExperts.from_experts(ALL["gpt_oss"](), scheme)
    layer.config = None  # type: ignore[assignment]
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        getattr(layer, name).data.copy_(getattr(layer, name).half().bfloat16())
    moved = move(copy.deepcopy(layer))
    assert_same(layer, moved)
    assert torch.equal(moved(*inputs(moved, 5)), layer(*inputs(layer, 5)))


def test_only_biases_follow_a_dtype() -> None:
    layer = QuantExperts.from_experts(ALL["gpt_oss"]()).to(torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in layer.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.int8} == {"gate_up_proj", "down_proj"}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == {
        "gate_up_proj_bias",
        "down_proj_bias",
    }


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_goes_into_a_new_module(assign: bool) -> None:
    layer = QuantExperts.from_experts(ALL["llama4"]())
    other = QuantSortedExperts(E, HIDDEN, INTERMEDIATE, device="meta" if assign else "cpu")
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert_same(layer, other)
    halved = {name: t.half() if t.is_floating_point() else t for name, t in layer.state_dict().items()}
    other.load_state_dict(halved, assign=assign)
    assert other.down_proj_scale.dtype == torch.float32


def test_float_weights_are_refused_by_name() -> None:
    module = ALL["mixtral"]()
    layer = QuantExperts.from_experts(module)
    with pytest.raises(RuntimeError, match=r"gate_up_proj is torch.float32 but QuantExperts holds torch.int8: load "):
        layer.load_state_dict(module.state_dict(), strict=False)


def test_meta_modules_give_meta_modules() -> None:
    layer = QuantExperts.from_experts(ALL["gpt_oss"]().to("meta"))
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
    assert layer.activation == GPT_OSS


def test_what_code_around_experts_reads_is_there() -> None:
    module = ALL["mixtral"]()
    layer = QuantExperts.from_experts(module)
    assert layer.num_experts == E
    assert layer.config is module.config
    assert not layer.training
