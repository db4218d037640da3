"""``torch.ops.qgemm.quant_experts``: registered properly, traced, and with the gradients of the float experts."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from families.experts import ALL, E, inputs
from torch import Tensor
from torch.nn import functional as F

import qgemm
from qgemm.kernels import GPT_OSS, GatedActivation
from qgemm.kernels import activations as host
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.nn import QuantExperts
from qgemm.ops import expert_gradients, quant_experts, weight_only_experts

ACTIVATIONS = [
    *(GatedActivation(name) for name in host.ACTIVATIONS),
    GatedActivation("relu2", gated=False),
    GatedActivation("gelu_tanh", gated=False, limit=0.5),
    GatedActivation("silu", limit=0.5),
    dataclasses.replace(GPT_OSS, limit=0.7),
]
activations = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)


def operands(activation: GatedActivation, bias: bool, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """Arguments of ``quant_experts`` before the activation, for 9 tokens, one of which meets no expert."""
    layer = QuantExperts(E, 16, 12, activation, bias=bias, device=device, dtype=dtype)
    for name, parameter in layer.named_parameters():
        if parameter.dtype == torch.int8:
            parameter.data = torch.randint(-127, 128, parameter.shape, dtype=torch.int8, device=device)
        else:
            parameter.data.uniform_(0.003, 0.006) if name.endswith("scale") else parameter.data.normal_()
    x = torch.randn(9, 16, device=device).to(dtype)
    index = torch.randint(0, E, (9, 2), device=device)
    index[0] = E
    index[1, 1] = -1
    names = [f"{weight}{end}" for weight in ("gate_up_proj", "down_proj") for end in ("", "_scale", "_bias")]
    return x, index, torch.rand(9, 2, device=device), *map(layer.stored, names)


def fields(activation: GatedActivation) -> tuple[Any, ...]:
    return tuple(getattr(activation, field.name) for field in dataclasses.fields(activation))


def float_experts(activation: GatedActivation, *arguments: Any) -> Tensor:
    """The same function with dequantized weights, by plain PyTorch."""
    x, index, weights, first, first_scale, first_bias, second, second_scale, second_bias = arguments
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(E):
        biases = [None if bias is None else bias[expert].float() for bias in (first_bias, second_bias)]
        h = F.linear(x.float(), first[expert] * first_scale[expert][:, None], biases[0])
        y = F.linear(activation(h), second[expert] * second_scale[expert][:, None], biases[1])
        out = out + y * (weights.float() * (index == expert)).sum(1, keepdim=True)
    return out.to(x.dtype)


@pytest.mark.slow(quick=["True"])
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(bias: bool, device: torch.device) -> None:
    x, index, weights, *rest = operands(GPT_OSS, bias, device)
    x.requires_grad_()
    weights.requires_grad_()
    residual = torch.randn_like(x).requires_grad_() if bias else None
    torch.library.opcheck(torch.ops.qgemm.quant_experts.default, (x, index, weights, *rest, *fields(GPT_OSS), residual))
    arguments = (torch.randn_like(x), x.detach(), index, weights.detach(), *rest, *fields(GPT_OSS))
    torch.library.opcheck(torch.ops.qgemm.quant_experts_backward.default, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [pytest.param("fp8", marks=pytest.mark.complete), "fp8-block"])
def test_opcheck_in_fp8(scheme: str, device: torch.device) -> None:
    layer = QuantExperts.from_experts(ALL["gpt_oss"](), scheme).to(device)
    x, index, weights = (each.to(device) for each in inputs(layer, 9))
    names = [f"{weight}{end}" for weight in layer.weight_names for end in ("", "_scale", "_bias")]
    rest = *map(layer.stored, names), *fields(GPT_OSS)
    whole = x.requires_grad_(), index, weights.requires_grad_(), *rest, torch.randn_like(x).requires_grad_()
    # PyTorch's check of schemas multiplies arguments by numbers, which float8 can't be.
    kinds = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(torch.ops.qgemm.quant_experts.default, whole, test_utils=kinds)
    arguments = torch.randn_like(x), x.detach(), index, weights.detach(), *rest
    torch.library.opcheck(torch.ops.qgemm.quant_experts_backward.default, arguments, test_utils=kinds)


def weight_only_operands(scheme: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """Arguments of ``weight_only_experts`` before the activation, for 9 tokens, and what comes after its fields."""
    layer = QuantExperts.from_experts(ALL["gpt_oss"]().to(dtype), scheme).to(device)
    x = torch.randn(9, layer.hidden_size, device=device).to(dtype)
    index = torch.randint(0, E, (9, 2), device=device)
    index[0] = E
    ends = ("", "_scale", "_zero_point", "_global_scale", "_bias")
    names = [f"{weight}{end}" for weight in ("gate_up_proj", "down_proj") for end in ends]
    form = layer.scheme.weight.dtype, layer.scheme.weight.group_size or 0
    return (x, index, torch.rand(9, 2, device=device), *map(layer.stored, names)), form, layer


@pytest.mark.parametrize("scheme", ["mxfp4", "int4-32-asymmetric", "int4-32-float-zeros"])
def test_opcheck_of_weight_only_experts(scheme: str, device: torch.device) -> None:
    (x, index, weights, *rest), form, _ = weight_only_operands(scheme, device)
    x.requires_grad_()
    arguments = (x, index, weights, *rest, *fields(GPT_OSS), *form, *form)
    torch.library.opcheck(torch.ops.qgemm.weight_only_experts.default, (*arguments, torch.randn_like(x)))
    gradient = torch.ops.qgemm.weight_only_experts_backward.default
    torch.library.opcheck(gradient, (torch.randn_like(x), x.detach(), *arguments[1:]))


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "int4-channel", "int4-32-float-zeros"])
def test_gradients_of_weight_only_experts(scheme: str, device: torch.device) -> None:
    (x, index, weights, *_), _, layer = weight_only_operands(scheme, device)
    x.requires_grad_()
    weights.requires_grad_()
    residual, grad = torch.randn_like(x).requires_grad_(), torch.randn_like(x)
    whole = layer.dequantize(torch.float32)
    ones = (torch.ones(value.shape[:2], device=device) for value in (whole["gate_up_proj"], whole["down_proj"]))
    parts = [(whole[name], one, whole[f"{name}_bias"]) for name, one in zip(layer.weight_names, ones, strict=True)]
    wanted = torch.autograd.grad(float_experts(GPT_OSS, x, index, weights, *parts[0], *parts[1]), (x, weights), grad)
    found = torch.autograd.grad(layer(x, index, weights, residual), (x, weights, residual), grad)
    assert torch.equal(found[2], grad)
    for ours, theirs in zip(found, wanted, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block"])
def test_gradients_of_fp8_experts(scheme: str, device: torch.device) -> None:
    layer = QuantExperts.from_experts(ALL["gpt_oss"](), scheme).to(device)
    x, index, weights = (each.to(device) for each in inputs(layer, 9))
    whole = QuantExperts.from_experts(ALL["gpt_oss"](), "int8")
    found = torch.autograd.grad(layer(x.requires_grad_(), index, weights).sum(), x)[0]
    wanted = torch.autograd.grad(whole.to(device)(x, index, weights).sum(), x)[0]
    assert (found - wanted).norm() / wanted.norm() < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up": lambda t: t.int()}, r"gate_up is torch.int32 \[4, 96, 128\]; it must be torch.uint8"),
        ({"down": lambda t: t[..., :64]}, r"down is torch.uint8 \[4, 64, 64\]; it must be torch.uint8 \[4, 64, 128\]"),
        ({"down_scale": lambda t: t[..., :1]}, r"down's scale is .*; it must be .* \[4, 64, 2\]"),
        ({"gate_up_bias": lambda t: t[:, 1:]}, r"gate_up's bias is .*; it must be .* \[4, 96\]"),
        ({"gate_up_scale": lambda t: t.mT.contiguous().mT}, "gate_up's scale has strides .*; it must be contiguous"),
        (
            {"down_zero_point": lambda _: torch.zeros(4, 64, 2)},
            "down's zero point is torch.float32, of fp4 with scales in",
        ),
        ({"gate_up_format": lambda _: "fp3"}, "gate_up_format is 'fp3'; it must be one of"),
        ({"down_group_size": lambda _: -1}, "down_group_size is -1; it must be at least 1, or 0"),
        ({"x": lambda t: t[:, 1:]}, r"x is \[9, 63\]; it must be \[T, 64\]"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_wrong_arguments_of_weight_only_experts(changes: dict[str, Any], message: str) -> None:
    (x, index, weights, *rest), form, _ = weight_only_operands("mxfp4", torch.device("cpu"))
    values = {"x": x} | WeightOnlyExperts(*rest, GPT_OSS, *form, *form)._asdict()
    for name, change in changes.items():
        values[name] = change(values[name])
    with pytest.raises(ValueError, match=message):
        weight_only_experts(values.pop("x"), index, weights, WeightOnlyExperts(**values))


def test_a_residual_is_added_and_has_the_gradient_of_the_sum(device: torch.device) -> None:
    x, index, weights, *rest = operands(GPT_OSS, True, device)
    residual, grad, experts = torch.randn_like(x).requires_grad_(), torch.randn_like(x), ExpertWeights(*rest, GPT_OSS)
    alone = quant_experts(x, index, weights, experts)
    for call in (
        lambda r: quant_experts(x, index, weights, experts, r),
        lambda r: torch.ops.qgemm.quant_experts(x, index, weights, *rest, *fields(GPT_OSS), r),
    ):
        out = call(residual)
        assert torch.equal(out, residual + alone)
        assert torch.equal(torch.autograd.grad(out, residual, grad)[0], grad)
        assert torch.equal(call(residual.detach()), residual + alone)


@activations
def test_gradients_are_those_of_the_dequantized_experts(activation: GatedActivation, device: torch.device) -> None:
    x, index, weights, *rest = operands(activation, True, device)
    x.requires_grad_()
    weights.requires_grad_()
    grad = torch.randn_like(x)
    wanted = torch.autograd.grad(float_experts(activation, x, index, weights, *rest), (x, weights), grad)
    found = torch.autograd.grad(quant_experts(x, index, weights, ExpertWeights(*rest, activation)), (x, weights), grad)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    x, index, weights, *rest = operands(GPT_OSS, True, device, dtype)
    x.requires_grad_()
    weights = weights.to(dtype).requires_grad_()
    wanted = torch.autograd.grad(float_experts(GPT_OSS, x, index, weights, *rest).sum(), (x, weights))
    found = torch.autograd.grad(quant_experts(x, index, weights, ExpertWeights(*rest, GPT_OSS)).sum(), (x, weights))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).norm() / theirs.norm() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("scheme", ["int8", "fp8-block", "int4-32-asymmetric", "mxfp4", "nvfp4"])
def test_gradients_of_several_experts_at_a_time(
    scheme: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """In bfloat16 float weights of several experts are made at once: two, then two, or all; or one after the other."""
    layer = QuantExperts.from_experts(ALL["gpt_oss"]().bfloat16(), scheme).to(device)
    H, columns = layer.hidden_size, 3 * layer.intermediate_size
    x, index = torch.randn(9, H, device=device).bfloat16(), torch.randint(0, E - 1, (9, 2), device=device)
    index[0], index[1, 1] = E, -1
    weights, grad = torch.rand(9, 2, device=device), torch.randn(9, H, device=device).bfloat16()
    whole = layer.dequantize(torch.float32)
    ones = (torch.ones(value.shape[:2], device=device) for value in (whole["gate_up_proj"], whole["down_proj"]))
    parts = [(whole[name], one, whole[f"{name}_bias"]) for name, one in zip(layer.weight_names, ones, strict=True)]

    def of(run: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = x.to(dtype).requires_grad_(), weights.clone().requires_grad_()
        return torch.autograd.grad(run(inputs[0], index, inputs[1]), inputs, grad.to(dtype))

    wanted = of(lambda *each: float_experts(GPT_OSS, *each, *parts[0], *parts[1]), torch.float32)
    grouped = []
    product = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *a, **k: (grouped.append(len(a[1])), product(*a, **k))[1]
    )
    for count in (1, 2, E):
        monkeypatch.setattr(expert_gradients, "MAX_FLOAT_BYTES", count * H * columns * 2)
        grouped.clear()
        found = of(layer, torch.bfloat16)
        assert grouped == ([] if scheme == "nvfp4" or count == 1 else [count] * 3 * (E // count))
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours.float() - theirs).norm() / theirs.norm() < 0.02


def test_gradients_of_one_of_the_two(device: torch.device) -> None:
    x, index, weights, *rest = operands(GPT_OSS, False, device)
    quant_experts(x.requires_grad_(), index, weights, ExpertWeights(*rest, GPT_OSS)).sum().backward()
    assert x.grad is not None
    quant_experts(x.detach(), index, weights.requires_grad_(), ExpertWeights(*rest, GPT_OSS)).sum().backward()
    assert weights.grad is not None
    # An expert that isn't here gives its weight no gradient.
    assert not weights.grad[0].any()
    assert weights.grad[1, 1] == 0


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_no_tokens(create_graph: bool, device: torch.device) -> None:
    x, index, weights, *rest = operands(GPT_OSS, True, device)
    x, weights = x[:0].requires_grad_(), weights[:0].requires_grad_()
    out = torch.ops.qgemm.quant_experts(x, index[:0], weights, *rest, *fields(GPT_OSS))
    grads = torch.autograd.grad(out.sum(), (x, weights), create_graph=create_graph)
    assert [grad.shape for grad in grads] == [x.shape, weights.shape] == [(0, 16), (0, 2)]


def test_other_gradients_are_refused(device: torch.device) -> None:
    x, index, weights, gate_up, scale, *rest = operands(GPT_OSS, False, device)
    out = quant_experts(x, index, weights, ExpertWeights(gate_up, scale.requires_grad_(), *rest, GPT_OSS))
    with pytest.raises(RuntimeError, match="gradients for x, top_k_weights and residual only"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["gate_up_proj_scale", "gate_up_proj_bias", "down_proj_scale", "down_proj_bias"])
def test_what_has_no_gradient_is_refused_one_by_one(name: str) -> None:
    layer = QuantExperts(E, 16, 8, bias=True)
    for key, parameter in layer.named_parameters():
        parameter.data.fill_(1) if key.endswith("scale") else parameter.data.zero_()
    layer.get_parameter(name).requires_grad_()
    index, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(RuntimeError, match="gradients for x, top_k_weights and residual only; freeze the others"):
        layer(torch.randn(3, 16), index, weights).sum().backward()


def test_forward_mode_is_refused_and_torch_func_grad_works() -> None:
    activation = GatedActivation()
    x, index, weights, *others = operands(activation, True, torch.device("cpu"))
    call = lambda x: torch.ops.qgemm.quant_experts(x, index, weights, *others, *fields(activation)).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="quant_experts has no derivative in forward mode"):
        torch.func.jvp(call, (x,), (x,))
    tracked = x.clone().requires_grad_()
    call(tracked).backward()
    assert torch.equal(torch.func.grad(call)(x), tracked.grad)


# Of a kind of weights each, in both layouts.
COMPILED = [("int8", "gpt_oss"), ("int8", "llama4"), ("mxfp4", "gpt_oss"), ("fp8-block", "gpt_oss")]
COMPILED += [pytest.param(scheme, "llama4", marks=pytest.mark.complete) for scheme in ("int4-32", "fp8")]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "family"), COMPILED)
def test_compiled_in_one_graph(scheme: str, family: str, device: torch.device) -> None:
    layer = QuantExperts.from_experts(ALL[family](), scheme).to(device)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9):
        x, *routing = (t.to(device) for t in inputs(layer, tokens))
        eager_x, compiled_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        wanted, out = layer(eager_x, *routing), compiled(compiled_x, *routing)
        assert torch.equal(out, wanted)
        out.sum().backward()
        wanted.sum().backward()
        assert torch.equal(compiled_x.grad, eager_x.grad)


@pytest.mark.parametrize("scheme", ["int8", "int4-32", "mxfp4", "fp8", "fp8-block"])
def test_exported_with_a_dynamic_number_of_tokens(scheme: str, device: torch.device) -> None:
    layer = QuantExperts.from_experts(ALL["mixtral"](), scheme).to(device)
    tokens = torch.export.Dim("tokens", min=2)
    example = tuple(t.to(device) for t in inputs(layer, 5))
    program = torch.export.export(layer, example, dynamic_shapes=tuple({0: tokens} for _ in example))
    name = "weight_only_experts" if layer.scheme.is_weight_only else "quant_experts"
    assert f"qgemm.{name}" in str(program.graph)
    other = tuple(t.to(device) for t in inputs(layer, 8))
    assert torch.equal(program.module()(*other), layer(*other))


def test_errors_are_the_same_while_tracing() -> None:
    layer = qgemm.nn.QuantExperts(E, 16, 12, device="meta")
    x, index = torch.randn(3, 17, device="meta"), torch.zeros(3, 2, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"x is \[3, 17\]; it must be \[T, 16\]: reshape it"):
        layer(x, index, torch.ones(3, 2, device="meta"))


@activations
def test_second_derivatives_are_those_of_the_dequantized_experts(activation: GatedActivation) -> None:
    arguments, found = operands(activation, True, torch.device("cpu")), []
    of_out, of_grad = torch.randn(9, 16), torch.randn(9, 16)
    for function in (lambda *each: torch.ops.qgemm.quant_experts(*each, *fields(activation)), float_experts):
        x, weights = (arguments[at].clone().requires_grad_() for at in (0, 2))
        given = (activation,) if function is float_experts else ()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = (function(*given, x, arguments[1], weights, *arguments[3:]) * of_out).sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            found.append(torch.autograd.grad((grad * of_grad).sum(), (x, weights), materialize_grads=True))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_second_derivatives_in_torch_func_are_refused() -> None:
    layer = QuantExperts.from_experts(ALL["gpt_oss"]())
    x, index, weights = inputs(layer, 5)
    gradient = torch.func.grad(lambda x: layer(x, index, weights).square().sum())
    with pytest.raises(RuntimeError, match=r"no second derivatives in torch\.func: use .*create_graph"):
        torch.func.jacrev(gradient)(x)
    one_by_one = torch.func.vmap(torch.func.grad(lambda x, i, w: layer(x[None], i[None], w[None]).square().sum()))
    torch.testing.assert_close(one_by_one(x, index, weights), gradient(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("index", "weights", "message"),
    [
        (torch.rand(3, 2), torch.rand(3, 2), r"top_k_index is torch.float32 \[3, 2\]; it must be torch.int64 \[3, k\]"),
        (torch.ones(3, 2, dtype=torch.bool), torch.rand(3, 2), "top_k_index is torch.bool"),
        (None, torch.rand(3, 2), "top_k_index is a NoneType; it must be a tensor"),
        (torch.ones(3, 2, dtype=torch.int32), None, "top_k_weights is a NoneType; it must be a tensor"),
    ],
    ids=["probabilities", "mask", "no index", "no weights"],
)
@pytest.mark.parametrize("scheme", ["int8", "mxfp4"])
def test_what_is_no_routing_is_refused(index: Any, weights: Any, message: str, scheme: str) -> None:
    layer = QuantExperts(3, 8, 6, scheme=scheme)
    with pytest.raises((TypeError, ValueError), match=message):
        layer(torch.randn(3, 8), index, weights)
