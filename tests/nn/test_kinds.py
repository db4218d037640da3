"""What holds for the linear layers of every scheme: how they are made, what they compute, and their gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families.schemes import ERRORS, EVERY_LAYER, decided_weight, input_scale_for, quantized_layer
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.pytorch_utils import Conv1D

from qgemm.nn import LinearLayer, QuantLinear, linear_class
from qgemm.nn.kinds import meta_linear
from qgemm.scheme import SCHEMES, resolve_scheme

SCHEME = pytest.mark.parametrize("scheme", EVERY_LAYER)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
# Not a whole number of words or groups; a power of two times an odd number.
K, N = 152, 40


def make(scheme: str, bias: bool = True, dtype: torch.dtype = torch.float32, device: Any = None) -> LinearLayer:
    return quantized_layer(nn.Linear(K, N, bias=bias, device=device, dtype=dtype), scheme)


def assert_same(a: LinearLayer, b: LinearLayer) -> None:
    """The same kind of layer with the same parameters, bit for bit."""
    assert type(a) is type(b)
    assert a.scheme == b.scheme
    mine, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        assert not theirs[name].requires_grad
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value.cpu(), theirs[name].cpu()), name


def test_every_named_scheme_has_a_class_and_is_tested() -> None:
    classes = {scheme: linear_class(scheme) for scheme in EVERY_LAYER}
    assert set(SCHEMES) <= set(classes)
    assert classes["int8"] is classes["int8-static"] is QuantLinear
    with pytest.raises(ValueError, match=r"scheme is 'int3' \(.*\); it must be one of"):
        linear_class("int3")


@SCHEME
def test_a_new_layer_gives_nan(scheme: str, device: torch.device) -> None:
    layer = linear_class(scheme)(K, N, device=device, dtype=torch.bfloat16, scheme=scheme)
    assert layer.bias is not None
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert {parameter.device for parameter in layer.parameters()} == {device}
    out = layer(torch.randn(3, K, device=device))
    assert out.isnan().all(), "a layer that never got any values has no plausible answer"


@SCHEME
@pytest.mark.parametrize("bias", [True, False])
def test_a_new_layer_is_one_that_was_quantized_but_for_values(scheme: str, bias: bool) -> None:
    made = make(scheme, bias, torch.bfloat16)
    new = meta_linear(scheme, K, N, bias, torch.bfloat16)
    wanted = {name: (parameter.shape, parameter.dtype) for name, parameter in new.named_parameters()}
    assert {name: (parameter.shape, parameter.dtype) for name, parameter in made.named_parameters()} == wanted
    on_meta = quantized_layer(nn.Linear(K, N, bias=bias, device="meta", dtype=torch.bfloat16), scheme)
    assert {name: (parameter.shape, parameter.dtype) for name, parameter in on_meta.named_parameters()} == wanted


@SCHEME
def test_parameters_take_no_more_memory_than_they_show(scheme: str) -> None:
    for name, parameter in make(scheme).named_parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name
        assert parameter.is_contiguous(), name


@SCHEME
@DTYPES
@pytest.mark.parametrize("shape", [(5, K), (K,), (2, 3, K), (0, K), (1, 1, K)])
def test_the_output_is_close_to_the_float_layer_s(
    scheme: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    linear = nn.Linear(K, N, device=device).to(dtype)
    layer = quantized_layer(linear, scheme)
    x = torch.randn(shape, device=device).clamp(-3.9, 3.9).to(dtype)
    out = layer(x)
    assert out.dtype == dtype
    assert out.shape == (*shape[:-1], N)
    exact = linear(x).detach().double()
    error = ERRORS[resolve_scheme(scheme).weight.dtype]
    assert (out.double() - exact).norm() <= error * exact.norm()
    assert torch.equal(layer(input=x), out)


@SCHEME
def test_the_output_is_that_of_the_float_layer_it_stands_for(scheme: str, device: torch.device) -> None:
    layer = make(scheme, device=device)
    x = torch.randn(64, K, device=device).clamp(-3.9, 3.9)
    exact = layer.dequantize(torch.float64)(x.double()).detach()
    # What is left is the rounding of activations, if any.
    limit = 1e-3 if layer.scheme.activation is None else ERRORS[layer.scheme.activation.dtype] / 1.5
    assert (layer(x).double() - exact).norm() <= limit * exact.norm()


@SCHEME
def test_from_conv1d(scheme: str) -> None:
    conv1d = Conv1D(N, K)
    linear = nn.Linear(K, N)
    linear.weight, linear.bias = nn.Parameter(conv1d.weight.t().contiguous()), conv1d.bias
    assert_same(quantized_layer(conv1d, scheme), quantized_layer(linear, scheme))


@SCHEME
def test_from_float64(scheme: str) -> None:
    linear = nn.Linear(K, N)
    assert_same(quantized_layer(copy.deepcopy(linear).double(), scheme), quantized_layer(linear, scheme))


@SCHEME
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_is_made_alike_under_autocast(scheme: str, dtype: torch.dtype) -> None:
    linear = nn.Linear(K, N)
    wanted = quantized_layer(linear, scheme)
    with torch.autocast("cpu", dtype=dtype):
        assert_same(quantized_layer(linear, scheme), wanted)


@SCHEME
def test_from_linear_leaves_the_float_layer_alone(scheme: str) -> None:
    linear = nn.Linear(K, N)
    before = copy.deepcopy(linear.state_dict())
    layer = quantized_layer(linear.eval(), scheme)
    assert not layer.training
    assert all(torch.equal(value, before[name]) for name, value in linear.state_dict().items())


@SCHEME
def test_a_decided_weight_is_what_the_layer_holds(scheme: str) -> None:
    linear = nn.Linear(K, N)
    decided = decided_weight(linear, scheme)
    layer = quantized_layer(linear, scheme, decided)
    stored = layer.store_rows(*decided)
    assert list(stored) == [name for name in layer.row_names if name in stored]
    for name, value in stored.items():
        assert layer.stored(name).tolist() == value.tolist()


@SCHEME
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda q, s, *z: (q.int(), s, *z), "weight's values are torch.int32"),
        (lambda q, s, *z: (q[:, 1:], s, *z), rf"\[{N}, {K - 1}\]; they must be"),
        (lambda q, s, *z: (beyond(q), s, *z), "weight's values go from"),
        (lambda q, s, *z: (q, s.double(), *z), "weight's scale is torch.float64"),
        (lambda q, s, *z: (q, s[1:], *z), "weight's scale is torch.float32"),
        (lambda q, s, *z: (q, s[..., None], *z), "weight's scale is torch.float32"),
        (lambda q, s, *z: (q, s * 0, *z), "weight's scale must be finite and greater than 0"),
        (lambda q, s, *z: (q, s * torch.nan, *z), "weight's scale must be finite and greater than 0"),
        (lambda q, s, *z: (q, s) if z else (q, s, torch.zeros_like(s).char()), "(needs|takes no) zero points"),
    ],
)
def test_a_decided_weight_is_checked(scheme: str, spoil: Callable[..., Any], message: str) -> None:
    linear = nn.Linear(K, N)
    if resolve_scheme(scheme).weight.format.low == -128 and "go from" in message:
        return  # every int8 is a value
    with pytest.raises(ValueError, match=message):
        quantized_layer(linear, scheme, spoil(*decided_weight(linear, scheme)))


@pytest.mark.parametrize("scheme", ["int4", "int4-32", "int4-32-asymmetric", "mxfp4", "nvfp4"])
def test_a_decided_weight_has_scales_as_they_are_stored(scheme: str) -> None:
    linear = nn.Linear(K, N)
    values, scale, *zeros = decided_weight(linear, scheme)
    scale[3, 0] *= 1.01
    with pytest.raises(ValueError, match=f"weight's scale isn't {resolve_scheme(scheme).weight.scale_dtype} everywher"):
        quantized_layer(linear, scheme, (values, scale, *zeros))


def beyond(values: Tensor) -> Tensor:
    """Such as no format has."""
    if values.is_floating_point():
        return torch.full_like(values, torch.nan)
    return torch.full_like(values, -128 if values.dtype == torch.int8 else 16)


@SCHEME
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_refused(scheme: str, value: float) -> None:
    linear = nn.Linear(K, N)
    with torch.no_grad():
        linear.weight[7, 130] = value
    with pytest.raises(ValueError, match=r"weight holds NaN or Inf.*: repair the checkpoint or skip the layer"):
        quantized_layer(linear, scheme)


def test_a_weight_whose_scale_would_not_be_finite_is_refused() -> None:
    linear = nn.Linear(K, N)
    with torch.no_grad():
        linear.weight[7, 130] = 3.4e38
    with pytest.raises(
        ValueError, match=r"or numbers too large for a scale.*: repair the checkpoint or skip the layer"
    ):
        quantized_layer(linear, "nf4")


@SCHEME
def test_an_input_scale_goes_with_static_schemes_only(scheme: str) -> None:
    found = resolve_scheme(scheme)
    needs = "needs an input_scale" if found.is_static else "takes no input_scale"
    given = None if found.is_static else 0.5
    with pytest.raises(ValueError, match=f"scheme '{scheme}' {needs}"):
        linear_class(scheme).from_linear(nn.Linear(K, N), scheme, given)


@SCHEME
def test_rows_are_quantized_alike_whole_or_in_pieces(scheme: str) -> None:
    in_step = linear_class(scheme).rows_in_step
    linear = nn.Linear(K, N if in_step == 1 else 3 * in_step + 5, dtype=torch.bfloat16)
    layer = quantized_layer(linear, scheme)
    weight = linear.weight.detach()
    pieces = [layer.convert_rows(part) for part in weight.split(7 if in_step == 1 else 2 * in_step)]
    for name, value in layer.convert_rows(weight).items():
        assert torch.equal(torch.cat([piece[name] for piece in pieces]), value)
        assert layer.stored(name).tolist() == value.tolist()


@SCHEME
def test_rows_that_are_zero_or_not_finite(scheme: str, device: torch.device) -> None:
    layer = make(scheme, device=device)
    x = torch.randn(5, K, device=device).clamp(-3.9, 3.9)
    clean = layer(x)
    x[1], x[2, 5], x[3, 6], x[4, 7] = 0, torch.nan, torch.inf, -torch.inf
    out = layer(x)
    torch.testing.assert_close(out[0], clean[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out[1], layer.dequantize().bias, rtol=1e-6, atol=1e-6)
    assert not out[2:].isfinite().any()


@SCHEME
def test_wrong_inputs_are_named(scheme: str) -> None:
    layer = make(scheme)
    with pytest.raises(ValueError, match=f"^x has {K - 1} columns but the layer's in_features is {K}$"):
        layer(torch.randn(2, K - 1))
    with pytest.raises(TypeError, match=r"x is torch.float64; .*: call float\(\) on the model, or convert it"):
        layer(torch.randn(2, K, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x is on meta but .* is on"):
        layer(torch.empty(2, K, device="meta"))
    with pytest.raises(TypeError, match=r"x is torch.int64; a quantized layer accepts float16"):
        layer(torch.ones(2, K, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"x has no columns but the layer's in_features is {K}"):
        layer(torch.tensor(1.0))


@SCHEME
def test_a_sparse_input_says_what_to_do(scheme: str) -> None:
    layer = make(scheme)
    for requires_grad in (False, True):  # the second through PyTorch's dispatcher
        x = torch.ones(2, K).to_sparse().requires_grad_(requires_grad)
        with pytest.raises(ValueError, match=r"x is torch.sparse_coo; it must be a dense tensor: pass x.to_dense\(\)"):
            layer(x)


@SCHEME
def test_a_model_in_float64_says_what_to_do(scheme: str) -> None:
    layer = make(scheme).double()
    with pytest.raises(TypeError, match=r"x is torch.float64; .*: call float\(\) on the model"):
        layer(torch.randn(2, K, dtype=torch.float64))
    assert layer.float()(torch.randn(2, K)).isfinite().all()


# In one dtype and the other; in both with --complete.
AUTOCAST = [
    pytest.param(scheme, dtype, marks=[] if (number + place) % 2 else [pytest.mark.complete])
    for number, scheme in enumerate(EVERY_LAYER)
    for place, dtype in enumerate((torch.bfloat16, torch.float16))
]


# One of each class, whose operators are those of its other schemes.
OF_EACH_CLASS = {linear_class(scheme): scheme for scheme in reversed(EVERY_LAYER)}.values()


@pytest.mark.parametrize(("scheme", "dtype"), AUTOCAST)
def test_under_autocast_the_output_is_that_of_a_cast_input(
    scheme: str, dtype: torch.dtype, device: torch.device, pytestconfig: pytest.Config
) -> None:
    layer, x = make(scheme, device=device), torch.randn(3, K, device=device)
    linear = layer.dequantize()
    with torch.autocast(device.type, dtype=dtype), torch.no_grad():
        out = layer(x)
        assert out.dtype == linear(x).dtype == dtype
        assert layer(x.to(torch.bfloat16)).dtype == linear(x.to(torch.bfloat16)).dtype == dtype
        with torch.autocast(device.type, enabled=False):
            assert torch.equal(layer(x), linear_free(layer, x))
        if scheme in OF_EACH_CLASS or pytestconfig.getoption("--complete"):
            torch._dynamo.reset()  # it counts how often one forward is compiled
            assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), out)
    error = (out.float() - layer(x)).norm() / layer(x).norm()
    assert error < 4 * torch.finfo(dtype).eps + 0.02  # a cast moves values to other steps of int8
    assert layer(x).dtype == torch.float32


def linear_free(layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    """What the layer gives without autocast."""
    with torch.autocast(x.device.type, enabled=False):
        return layer.compute(x)


@SCHEME
def test_gradients_under_autocast(scheme: str, device: torch.device) -> None:
    layer = make(scheme, device=device)
    x = torch.randn(3, K, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = layer(x)
    out.backward(torch.ones_like(out))
    wanted = layer.dequantize().weight.sum(0).expand(3, K)
    assert x.grad.dtype == torch.float32
    assert (x.grad - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.slow(quick=["int4-channel"])
@SCHEME
def test_derivatives_of_torch_func(scheme: str) -> None:
    layer, x, along = make(scheme), torch.randn(3, K), torch.randn(3, K)
    weight = layer.dequantize().weight.detach()
    func = torch.func
    torch.testing.assert_close(func.jvp(layer, (x,), (along,))[1], along @ weight.t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(func.vjp(layer, x)[1](along[:, :N])[0], along[:, :N] @ weight, rtol=1e-5, atol=1e-5)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, along)))
    assert torch.equal(out.primal, layer(x))
    torch.testing.assert_close(out.tangent, along @ weight.t(), rtol=1e-5, atol=1e-5)
    for jacobian in (func.jacfwd, func.jacrev):
        torch.testing.assert_close(jacobian(layer)(x[0]), weight, rtol=1e-5, atol=1e-5)
    hessian = 2 * weight.t() @ weight
    square = lambda x: layer(x).square().sum()  # noqa: E731
    for second in (func.hessian, lambda f: func.jacrev(func.jacrev(f)), lambda f: func.jacfwd(func.jacfwd(f))):
        torch.testing.assert_close(second(square)(x[0]), hessian, rtol=1e-5, atol=1e-5)
    each = func.vmap(func.grad(square))(x)
    torch.testing.assert_close(each, 2 * layer(x) @ weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(func.vmap(layer, in_dims=1)(x.t()), layer(x), rtol=1e-5, atol=1e-5)


@SCHEME
def test_forward_and_reverse_mode_together(scheme: str) -> None:
    layer, x, along = make(scheme), torch.randn(3, K, requires_grad=True), torch.randn(3, K)
    weight = layer.dequantize().weight.detach()
    with forward_ad.dual_level():
        out = layer(forward_ad.make_dual(x, along))
        tangent = forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent, along @ weight.t(), rtol=1e-5, atol=1e-5)
    out.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, K), rtol=1e-4, atol=1e-5)


@SCHEME
def test_a_layer_is_a_leaf_of_symbolic_tracing(scheme: str) -> None:
    model = nn.Sequential(nn.ModuleDict({"proj": make(scheme)})["proj"], nn.ReLU())
    graph = torch.fx.symbolic_trace(model)
    assert [(node.op, node.target) for node in graph.graph.nodes][1:3] == [("call_module", "0"), ("call_module", "1")]
    x = torch.randn(3, K)
    assert torch.equal(graph(x), model(x))


@SCHEME
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_jagged_nested_tensor(scheme: str) -> None:
    layer, parts = make(scheme), [torch.randn(3, K), torch.randn(5, K)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    out = layer(x)
    assert out.is_nested
    assert torch.equal(out.values(), layer(torch.cat(parts)))
    assert (out + layer.dequantize()(x)).shape == out.shape  # as rows of the same lengths
    out.values().sum().backward()
    assert x.grad.shape == x.shape


@SCHEME
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor(scheme: str) -> None:
    layer, parts = make(scheme), [torch.randn(2, 3, K), torch.randn(4, 0, K), torch.randn(1, 5, K)]
    x = torch.nested.nested_tensor(parts, requires_grad=True)
    out = layer(x)
    wanted = layer(torch.cat([part.reshape(-1, K) for part in parts]))
    assert [part.shape for part in out.unbind()] == [(2, 3, N), (4, 0, N), (1, 5, N)]
    assert torch.equal(torch.cat([part.reshape(-1, N) for part in out.unbind()]), wanted)
    out.to_padded_tensor(0.0).sum().backward()
    assert x.grad.is_nested


@SCHEME
@DTYPES
def test_gradients_reach_x_and_nothing_else(scheme: str, dtype: torch.dtype, device: torch.device) -> None:
    layer = make(scheme, dtype=dtype, device=device)
    x = torch.randn(3, K, device=device).to(dtype).requires_grad_()
    out = layer(x)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted = grad.double() @ layer.dequantize(torch.float64).weight
    assert (x.grad.double() - wanted).norm() <= 4 * torch.finfo(dtype).eps * wanted.norm()
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.slow(quick=["int8", "int4-channel"])
@SCHEME
def test_compile(scheme: str) -> None:
    layer, x = make(scheme), torch.randn(3, K).clamp(-3.9, 3.9)
    wanted = layer(x)
    torch._dynamo.reset()  # it counts how often one forward is compiled
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), wanted, rtol=1e-6, atol=1e-6)
    compiled(x.requires_grad_()).sum().backward()
    assert x.grad is not None


@SCHEME
def test_export(scheme: str) -> None:
    layer, x = make(scheme), torch.randn(3, K).clamp(-3.9, 3.9)
    rows = torch.export.Dim("rows")
    program = torch.export.export(layer, (x,), dynamic_shapes={"input": {0: rows}})
    more = torch.randn(7, K).clamp(-3.9, 3.9)
    torch.testing.assert_close(program.module()(more), layer(more), rtol=1e-6, atol=1e-6)


@SCHEME
def test_repr(scheme: str) -> None:
    shown = repr(make(scheme))
    assert shown.startswith(f"{linear_class(scheme).__name__}(in_features={K}, out_features={N}, bias=True, ")
    assert f"scheme='{scheme}'" in shown
    assert repr(input_scale_for(resolve_scheme(scheme))) not in shown or not resolve_scheme(scheme).is_static


def sizes() -> list[tuple[int, int]]:
    # No column, no row, one of either, fewer columns than outliers or than a group, several groups.
    return [(0, 3), (3, 0), (1, 1), (17, 5), (129, 5), (256, 5)]


@SCHEME
@pytest.mark.parametrize(("features_in", "features_out"), sizes())
def test_degenerate_sizes(scheme: str, features_in: int, features_out: int, device: torch.device) -> None:
    activation = resolve_scheme(scheme).activation
    if activation is not None and features_in < activation.outlier_columns:
        with pytest.raises(ValueError, match=f"columns in float, and in_features is {features_in}: use"):
            linear_class(scheme)(features_in, features_out, device=device, scheme=scheme)
        return
    layer = linear_class(scheme)(features_in, features_out, device=device, scheme=scheme)
    parameters: dict[str, Tensor] = dict(layer.named_parameters())
    parameters["weight_scale"].fill_(1)
    if "weight_global_scale" in parameters:
        parameters["weight_global_scale"].fill_(1)
    if layer.is_static:
        parameters["input_scale"].fill_(0.05)
    out = layer(torch.randn(5, features_in, device=device))
    assert out.shape == (5, features_out)
    assert not out.any()


@pytest.mark.parametrize("scheme", [*EVERY_LAYER, "int4-32-int8", "int4-ordered-int8"])
def test_layers_of_no_columns_or_no_rows(scheme: str) -> None:
    keeps_columns = resolve_scheme(scheme).outlier_columns > 0  # of which there must then be some
    for K, N in [*([] if keeps_columns else [(0, 5), (0, 0)]), (64, 0)]:
        linear = nn.Linear(K, N)
        nn.init.ones_(linear.bias)
        layer = quantized_layer(linear, scheme)
        out = layer(torch.randn(2, 3, K))
        assert torch.equal(out, torch.ones(2, 3, N)), (K, N)
        assert layer.dequantize().weight.shape == (N, K)
