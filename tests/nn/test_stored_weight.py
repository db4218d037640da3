"""What code around a quantized layer sees of its weight: all that it may ask, and no floats."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from qgemm import QuantExperts, QuantLinear, quantize_model
from qgemm.nn import QuantLayer, WeightOnlyLinear


class Reader(nn.Module):
    """Holds a layer, and computes something with its weight beside calling it."""

    def __init__(self, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.proj, x)


def scaled_by_a_view(layer: Any, x: Tensor) -> Tensor:
    return x[:, :1] * layer.weight.chunk(2)[0][0].view(-1)


READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "@": lambda layer, x: x @ layer.weight.t(),
    "@ from the left": lambda layer, x: layer.weight @ x.t(),
    "*": lambda layer, x: (x[:, None] * layer.weight).sum(-1),
    "* from the left": lambda layer, x: (layer.weight * x[:, None]).sum(-1),
    "F.linear": lambda layer, x: F.linear(x, layer.weight),
    "F.linear of a cast": lambda layer, x: F.linear(x, layer.weight.to(x.dtype)),
    "float()": lambda layer, x: layer.weight.float(),
    "type_as": lambda layer, x: layer.weight.type_as(x),
    "a float number": lambda layer, x: layer.weight * 0.5,
    "mean": lambda layer, x: layer.weight.mean(dtype=torch.float32),
    "detach": lambda layer, x: x[:, :1] * layer.weight.detach()[0],
    "data": lambda layer, x: x[:, :1] + layer.weight.data[0],
    "on its own device": lambda layer, x: x[:, :1] - layer.weight.to(x.device)[0],
    "a part of a view": scaled_by_a_view,
    "in place": lambda layer, x: x.clone().mul_(layer.weight[0]),
    "einsum": lambda layer, x: torch.einsum("mk,nk->mn", x, layer.weight),
    "concatenated": lambda layer, x: torch.cat((x, layer.weight)),
    "its own scales": lambda layer, x: layer.weight * layer.weight_scale[:, None],
    "a parameter made of it": lambda layer, x: x @ nn.Parameter(layer.weight, requires_grad=False).t(),
    "get_parameter": lambda layer, x: x @ layer.get_parameter("weight").t(),
    "overwritten by floats": lambda layer, x: layer.weight.copy_(x),
    "filled with a float": lambda layer, x: layer.weight.fill_(0.5),
    "initialized": lambda layer, x: nn.init.normal_(layer.weight),
    "scaled": lambda layer, x: layer.weight.mul_(0.5),
}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("scheme", ["int8", "int8-hadamard", "int4"])
def test_a_read_raises_and_names_the_layer(how: str, scheme: str, device: torch.device) -> None:
    x = torch.randn(16, 16, device=device)
    model = nn.ModuleDict({"block": Reader(READS[how])}).to(device)
    quantize_model(model, scheme)
    wanted = r"block\.proj is quantized.* u?int8.*skip='block\.proj' in quantize_model.*dequantize\(\)"
    with pytest.raises(RuntimeError, match=wanted):
        model["block"](x)


REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
    "divided by its norm": nn.utils.parametrizations.spectral_norm,
    "made orthogonal": nn.utils.parametrizations.orthogonal,
    "split into length and direction": nn.utils.parametrizations.weight_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "pruned by its structure": lambda layer: prune.ln_structured(layer, "weight", amount=0.5, n=2, dim=0),
}


@pytest.mark.parametrize("how", REPLACEMENTS)
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_a_weight_is_not_replaced_by_one_that_is_computed(how: str, scheme: str) -> None:
    model = quantize_model(nn.ModuleDict({"proj": nn.Linear(16, 16)}), scheme)
    layer, x = model["proj"], torch.randn(3, 16)
    wanted, attributes = layer(x), list(vars(layer))
    with pytest.raises(RuntimeError, match=r"^proj is quantized.*can't be parametrized or pruned.*skip='proj'"):
        REPLACEMENTS[how](layer)
    assert torch.equal(layer(x), wanted)
    assert list(vars(layer)) == attributes
    prune.random_unstructured(layer, "bias", amount=0.5)
    assert (layer(x) != wanted).any()


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_diffusers_does_not_join_projections(scheme: str) -> None:
    processors = pytest.importorskip("diffusers.models.attention_processor")
    attention = processors.Attention(query_dim=16, heads=2, dim_head=8)
    model = quantize_model(nn.ModuleDict({"attn": attention}), scheme)
    wanted = r"^attn.to_q is quantized: fuse_qkv_projections .* before quantize_model, or call qgemm.fuse\(model\)"
    with pytest.raises(RuntimeError, match=wanted):
        model["attn"].fuse_projections()
    assert model["attn"](torch.randn(1, 3, 16)).shape == (1, 3, 16)


def test_the_way_out_of_the_error() -> None:
    model = nn.ModuleDict({"block": Reader(READS["@"]), "other": nn.Linear(16, 16)})
    x = torch.randn(3, 16)
    wanted = model["block"](x)
    quantize_model(model, skip="block.proj")
    assert torch.equal(model["block"](x), wanted)


def test_experts_are_not_read_either() -> None:
    experts = QuantExperts(4, 16, 8)
    x = torch.randn(3, 16)
    with pytest.raises(RuntimeError, match=r"a layer is quantized: its weight is stored as int8"):
        F.linear(x, experts.gate_up_proj[1])
    with pytest.raises(RuntimeError, match="is quantized"):
        torch.bmm(x.expand(4, 3, 16), experts.down_proj)


def test_packed_values_are_not_read_either() -> None:
    with pytest.raises(RuntimeError, match="stored as uint8"):
        WeightOnlyLinear(16, 8).weight * torch.ones(128)


@pytest.fixture
def layer() -> QuantLinear:
    return QuantLinear.from_linear(nn.Linear(16, 8))


def test_what_may_be_asked(layer: QuantLinear) -> None:
    weight = layer.weight
    assert (weight.dtype, weight.device, weight.shape) == (torch.int8, torch.device("cpu"), (8, 16))
    assert (weight.shape.numel(), weight.size().numel()) == (128, 128)  # a torch.Size, not a tuple
    assert (weight.ndim, weight.numel(), weight.element_size(), weight.is_contiguous()) == (2, 128, 1, True)
    assert not weight.requires_grad
    assert not weight.is_floating_point()
    assert isinstance(weight, Tensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.data_ptr() == layer.stored("weight").data_ptr()
    assert torch.equal(weight, layer.state_dict()["weight"])
    assert weight.tolist() == layer.stored("weight").tolist()
    assert torch.zeros_like(weight, dtype=torch.float32).dtype == torch.float32
    assert weight.new_empty(3, dtype=torch.float32).shape == (3,)
    assert "dtype=torch.int8" in repr(weight)
    assert int(weight.abs().max()) <= 127


def test_where_modules_keep_parameters_they_are_plain(layer: QuantLinear) -> None:
    plain = layer.stored("weight")
    assert type(plain) is nn.Parameter
    assert dict(layer.named_parameters())["weight"] is plain
    assert layer._parameters["weight"] is plain
    assert type(layer.state_dict()["weight"]) is Tensor
    assert layer.state_dict(keep_vars=True)["weight"] is plain


def test_what_is_set_on_the_view_is_set_on_the_parameter(layer: QuantLinear) -> None:
    plain = layer.stored("weight")
    layer.weight._is_hf_initialized = True
    assert plain._is_hf_initialized
    assert layer.weight._is_hf_initialized
    assert not hasattr(layer.weight, "another")
    layer.weight.data = torch.ones(8, 16, dtype=torch.int8)
    assert layer.stored("weight") is plain
    assert plain.eq(1).all()
    layer.weight.copy_(torch.full((8, 16), 3, dtype=torch.int8))
    assert plain.eq(3).all()
    layer.weight[2] = 4
    assert plain[2].eq(4).all()


def test_a_view_that_is_stored_is_the_parameter(layer: QuantLinear) -> None:
    other = QuantLinear(16, 8)
    other.weight = layer.weight
    assert other.stored("weight") is layer.stored("weight")
    other.weight = nn.Parameter(layer.weight, requires_grad=False)
    assert type(other.stored("weight")) in (Tensor, nn.Parameter)
    assert "weight" in other.state_dict()
    x = torch.randn(3, 16)
    other.weight_scale, other.bias = layer.weight_scale, layer.bias
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda weight: through_torch_save(weight)])
def test_copies_of_a_view_are_parameters(how: Callable[[Any], Any], layer: QuantLinear) -> None:
    other = how(layer.weight)
    assert type(other) is nn.Parameter
    assert torch.equal(other, layer.stored("weight"))


def through_torch_save(weight: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_accelerate_moves_the_parameter(layer: QuantLinear) -> None:
    model = nn.Sequential(layer)
    x = torch.randn(3, 16)
    wanted = model(x)
    values = layer.stored("weight").clone()
    accelerate.utils.set_module_tensor_to_device(model, "0.weight", "meta")
    assert type(layer.stored("weight")) is nn.Parameter
    assert layer.weight.is_meta
    accelerate.utils.set_module_tensor_to_device(model, "0.weight", "cpu", values)
    assert type(layer.stored("weight")) is nn.Parameter
    assert torch.equal(model(x), wanted)


class AsksForTheDtype(nn.Module):
    """As T5's feed-forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.wo = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.wo.weight, Tensor) and self.wo.weight.dtype not in (x.dtype, torch.int8):
            x = x.to(self.wo.weight.dtype)
        return self.wo(x.to(self.wo.weight.device)).reshape(-1, self.wo.weight.shape[0])


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_compiled_model_may_ask_too(scheme: str) -> None:
    model = quantize_model(nn.Sequential(AsksForTheDtype()), scheme)
    x = torch.randn(3, 16)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), model(x))


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_a_replica_may_ask_too(scheme: str) -> None:
    # As nn.DataParallel makes it: with plain tensors in the place of parameters.
    model = quantize_model(nn.Sequential(AsksForTheDtype()), scheme)
    layer, x = model[0].wo, torch.randn(3, 16)
    replica = layer._replicate_for_data_parallel()
    for name, parameter in layer.named_parameters():
        setattr(replica, name, parameter.detach().clone())
    asks = model[0]._replicate_for_data_parallel()
    asks._modules["wo"] = replica
    assert torch.equal(asks(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["@", "*", "F.linear", "F.linear of a cast"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_compiled_model_may_not_read_either(how: str, scheme: str) -> None:
    model = quantize_model(nn.Sequential(Reader(READS[how])), scheme)
    x = torch.randn(16, 16)
    with pytest.raises(RuntimeError, match=r"0\.proj is quantized"):
        torch.compile(model, backend="eager")(x)
    with pytest.raises(Exception, match=r"0\.proj is quantized|Observed exception"):
        torch.compile(model, fullgraph=True, backend="eager")(x)
    with pytest.raises(RuntimeError, match=r"0\.proj is quantized"):
        torch.export.export(model, (x,))


def test_layers_know_their_names() -> None:
    model = quantize_model(nn.ModuleDict({"a": nn.Sequential(nn.Linear(8, 8)), "b": nn.Linear(8, 8)}))
    layers = {name: module.layer_name for name, module in model.named_modules() if isinstance(module, QuantLayer)}
    assert layers == {"a.0": "a.0", "b": "b"}
    assert copy.deepcopy(model)["b"].layer_name == "b"
