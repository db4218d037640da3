"""Layers that read one input in a module that is called: one product, whose parts wait for their layer."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from qgemm import quantize_model
from qgemm.fusion.siblings import SiblingWatch
from qgemm.nn.blocks.binding import bind, unbind
from qgemm.nn.blocks.siblings import FusedSibling, Siblings
from tests.operators import Operators


class Module(nn.Module):
    """Three layers of one input and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 32), nn.Linear(64, 16, bias=False), nn.Linear(64, 48)
        self.other = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, changes: bool = False) -> torch.Tensor:
        parts = [self.first(x), self.second(x)]
        if changes:
            x.mul_(2)
        return torch.cat([*parts, self.third(x), self.other(x + 1)], dim=-1)


def made() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return quantize_model(Module()), torch.randn(5, 64)


def found(module: Any, x: torch.Tensor) -> list[list[Any]]:
    watch = SiblingWatch(dict(module.named_modules()))
    handles = watch.hooks()
    module(x)
    for handle in handles:
        handle.remove()
    return [layers for _, layers in watch.found()]


def fused(module: Any, x: torch.Tensor) -> None:
    for layers in found(module, x):
        siblings = Siblings(layers)
        for place, layer in enumerate(layers):
            bind(layer, FusedSibling(siblings, place))


def products(module: Any, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, int]:
    with torch.no_grad(), Operators() as found:
        out = module(x.clone(), **options)
    return out, found.products


def test_one_product_with_the_same_bits() -> None:
    module, x = made()
    assert found(module, x) == [[module.first, module.second, module.third]]
    expected, count = products(module, x)
    fused(module, x)
    for each in (module, copy.deepcopy(module)):
        out, its_count = products(each, x)
        assert torch.equal(out, expected)
        assert (count, its_count) == (4, 2)
        with torch.inference_mode():
            assert torch.equal(each(x), expected)
    assert module.first(x).is_contiguous()
    for layer in (module.first, module.second, module.third):
        unbind(layer)
    assert products(module, x)[1] == 4


@pytest.mark.parametrize("way", ["an input that changes", "another order", "one alone"])
def test_layers_that_are_called_otherwise_compute_by_themselves(way: str) -> None:
    module, x = made()
    fused(module, x)
    plain, _ = made()
    if way == "an input that changes":
        expected, _ = products(plain, x, changes=True)
        assert torch.equal(products(module, x, changes=True)[0], expected)
    elif way == "another order":
        assert torch.equal(module.third(x), plain.third(x))
        assert torch.equal(module.first(x), plain.first(x))
        assert torch.equal(module.first(x), plain.first(x))
    else:
        for _ in range(2):
            y = torch.randn(2, 64)
            assert torch.equal(module.second(y), plain.second(y))
    out, count = products(module, x)
    assert torch.equal(out, products(plain, x)[0])
    assert count == 4


def test_gradients_are_those_of_the_layers() -> None:
    module, x = made()
    plain, _ = made()
    fused(module, x)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for each, own in zip((module, plain), inputs, strict=True):
        each(own).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]


def test_biases_that_are_trained_get_their_gradients() -> None:
    """Of an input that has none, too."""
    module, x = made()
    plain, _ = made()
    fused(module, x)
    for each in (module, plain):
        each.third.bias.requires_grad_()
        each(x).square().sum().backward()
    assert torch.equal(module.third.bias.grad, plain.third.bias.grad)


def test_what_is_left_alone() -> None:
    module, x = made()
    module.second = nn.Linear(64, 16)  # in float
    assert found(module, x) == [[module.first, module.third]]
    module.third.register_forward_hook(lambda *_: None)
    assert found(module, x) == []


def test_two_threads_get_what_is_theirs() -> None:
    module, _ = made()
    plain, _ = made()
    fused(module, torch.randn(5, 64))
    inputs = [torch.randn(3, 64) for _ in range(8)]
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        expected = [plain(x) for x in inputs]
        for _ in range(5):
            assert all(map(torch.equal, pool.map(torch.no_grad()(module), inputs), expected))
