"""The benchmark of fp8 products beside PyTorch's: wrong outputs are refused, means are over the weights."""

from dataclasses import replace

import pytest
import torch

from benchmarks import fp8
from benchmarks.fp8 import PRODUCTS, Result
from benchmarks.shapes import WeightShape
from qgemm_cli.timing import QUICK

pytestmark = pytest.mark.usefixtures("few_copies")

CPU = torch.device("cpu")
SHAPE = WeightShape("custom", 48, 256)


@torch.no_grad()
def test_matmul_beside_linear() -> None:
    found = fp8.measure(SHAPE, (1, 3), ("matmul",), QUICK, CPU)
    assert [(one.product, one.M, one.N, one.K) for one in found] == [("matmul", M, 48, 256) for M in (1, 3)]
    assert all(list(one.times) == ["F.linear"] and one.us > 0 for one in found)


@torch.no_grad()
@pytest.mark.parametrize("product", ["fp8", "fp8-block"])
def test_operands_are_what_they_are_checked_against(product: str) -> None:
    x = torch.randn(130, 200)
    for make in (PRODUCTS[product].rows, PRODUCTS[product].weight):
        back = make(x).to_float()
        assert back.dtype == torch.float64
        # e4m3 has 3 bits after the point.
        assert float((back - x).abs().max() / x.abs().max()) < 2**-4


@torch.no_grad()
def test_wrong_outputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PRODUCTS["matmul"]

    def wrong(a: fp8.Operand, b: fp8.Operand) -> torch.Tensor:
        out = right.run(a, b)
        out[-1, -8:] *= 1.1
        return out

    monkeypatch.setitem(PRODUCTS, "matmul", replace(right, run=wrong))
    with pytest.raises(ValueError, match="matmul is wrong: relative error"):
        fp8.measure(SHAPE, (3,), ("matmul",), QUICK, CPU)


def test_means_are_over_the_weights() -> None:
    results = [Result("fp8", 8, 8, 1, 1.0, {"default": times}) for times in (1.0, 4.0)]
    assert fp8.table(results)[1] == [["fp8", "1", "default", "2.00", "1.00"]]
