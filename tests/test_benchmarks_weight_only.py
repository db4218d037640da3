"""The benchmark of quantized layers beside float ones: wrong outputs are refused, means are over the weights."""

import pytest
import torch

from benchmarks import weight_only
from benchmarks.shapes import WeightShape
from benchmarks.weight_only import Result
from qgemm.nn import WeightOnlyLinear
from qgemm_cli.timing import QUICK

pytestmark = pytest.mark.usefixtures("few_copies")

CPU = torch.device("cpu")
SHAPE = WeightShape("custom", 48, 256)


@torch.no_grad()
def test_schemes_in_order_for_each_number_of_rows() -> None:
    found = weight_only.measure(SHAPE, (1, 3), ("int4", "int8-weight"), QUICK, CPU)
    assert [(one.scheme, one.M, one.N, one.K) for one in found] == [
        (scheme, M, 48, 256) for M in (1, 3) for scheme in ("int4", "int8-weight")
    ]
    # 128 bytes a row, and two bfloat16 scales.
    assert found[0].tb_per_s * found[0].us * 1e6 == pytest.approx(48 * (128 + 4))


@torch.no_grad()
def test_layers_that_quantize_rows() -> None:
    found = weight_only.measure(SHAPE, (3,), ("int8", "int4-int8"), QUICK, CPU)
    assert all(weight_only.MAX_ERROR / 10 < one.error < weight_only.MAX_ERROR_OF_QUANTIZED_ROWS for one in found)
    (found_fp8,) = weight_only.measure(SHAPE, (3,), ("fp8",), QUICK, CPU)
    assert weight_only.MAX_ERROR < found_fp8.error < weight_only.MAX_ERROR_OF_FP8_ROWS


@torch.no_grad()
def test_wrong_outputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = WeightOnlyLinear.forward
    monkeypatch.setattr(WeightOnlyLinear, "forward", lambda layer, x: right(layer, x) * 1.1)
    with pytest.raises(ValueError, match="int4 is wrong: relative error"):
        weight_only.measure(SHAPE, (1,), ("int4",), QUICK, CPU)


@torch.no_grad()
def test_a_wrong_tile_anywhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = WeightOnlyLinear.forward

    def wrong(layer: WeightOnlyLinear, x: torch.Tensor) -> torch.Tensor:
        out = right(layer, x)
        out[-1, -32:] *= 1.1
        return out

    monkeypatch.setattr(WeightOnlyLinear, "forward", wrong)
    with pytest.raises(ValueError, match="int4 is wrong: relative error"):
        weight_only.measure(WeightShape("custom", 1056, 256), (70,), ("int4",), QUICK, CPU)


def test_means_are_over_the_weights() -> None:
    results = [Result("int4", 8, 8, 1, 1.0, times, rate, 0.0) for times, rate in ((1.0, 2.0), (4.0, 3.0))]
    assert weight_only.table(results)[1] == [["int4", "1", "2.00", "1.00", "3.00"]]
