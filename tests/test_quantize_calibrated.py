"""quantize_model with calibration data: the scales that it finds, and what doesn't go together."""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

from qgemm import Calibration, calibrate, fuse
from qgemm.calibration import AWQ, GPTQ, MinMax, SmoothQuant
from qgemm.model.report import report
from qgemm.numerics.formats import INT8
from qgemm.quantize import quantize_model


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.1, "takes a pair, of a scale and a zero point"),
        ((0.1, 3, 4), "takes a pair"),
        ((-0.1, 3), r"input_scales\['0'\] is -0.1.*; it must be finite and greater than 0"),
        ((0.1, 3.5), r"zero point in input_scales\['0'\] is 3.5; it must be a whole number, -128 to 127"),
        ((0.1, 128), "it must be a whole number"),
    ],
)
def test_zero_points_that_do_not_fit(value: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(ValueError, match=message):
        quantize_model(model, "int8-static-asymmetric", input_scales={"0": value})
    with pytest.raises(ValueError, match="takes a single number"):
        quantize_model(model, "int8-static", input_scales={"0": (0.1, 3)})
    assert type(model[0]) is nn.Linear
    quantize_model(model, "int8-static-asymmetric", input_scales={"0": (0.1, 3)})
    assert model[0].input_zero_point == 3


def test_zero_points_reach_from_one_end_to_the_other() -> None:
    # What is never negative, as after ReLU, has its zero at the lowest value.
    for zero_point in (-128, 127):
        model = quantize_model(
            nn.Sequential(nn.Linear(8, 8)), "int8-static-asymmetric", input_scales={"0": (0.1, zero_point)}
        )
        assert int(model[0].input_zero_point) == zero_point


def test_zero_points_are_found_from_batches_and_statistics() -> None:
    x = torch.rand(50, 16) * 3 - 1
    layers = [nn.Sequential(nn.Linear(16, 8)).eval() for _ in range(3)]
    with calibrate(layers[0]) as calibration:
        layers[0](x)
    quantize_model(layers[0], "int8-static-asymmetric", calibration=calibration)
    quantize_model(layers[1], "int8-static-asymmetric", calibration=[x])
    quantize_model(layers[2], "int8-static-asymmetric", calibration=[x], recipe=[])
    low, high = float(x.min()), float(x.max())
    for model in layers:
        assert model[0].input_scale == pytest.approx((high - low) / 255)
        assert model[0].input_zero_point == round(-128 - low * 255 / (high - low))


def test_static_scales_of_a_rotated_layer_are_of_rotated_inputs() -> None:
    x = torch.zeros(50, 16)
    x[:, 3] = 1.0  # rotated, it is 1/4 everywhere
    model = nn.Sequential(nn.Linear(16, 8)).eval()
    with calibrate(model) as calibration:
        model(x)
    with pytest.raises(ValueError, match="which a Calibration has no statistics of: pass batches"):
        quantize_model(model, "int8-static-hadamard", calibration=calibration)
    quantize_model(model, "int8-static-hadamard", calibration=[x])
    assert model[0].input_scale == pytest.approx(0.25 / INT8.steps)
    assert report(model).recipe is None


def test_columns_that_stay_in_float_are_the_largest() -> None:
    x = torch.randn(50, 48)
    columns = torch.tensor([1, 4, *range(20, 34)])
    x[:, columns] *= 20
    model, plain = (nn.Sequential(nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 4)).eval() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    expected = model(x)
    for scheme in ("int8-outliers-16", "int8-static-outliers-16"):
        quantized = quantize_model(copy.deepcopy(model), scheme, calibration=[x])
        assert torch.equal(quantized[0].outlier_columns, columns)
        assert (quantized(x) - expected).norm() / expected.norm() < 0.01
        assert quantized[0].scheme.name == scheme
    # Where there are too few columns, or no input was seen.
    few = quantize_model(copy.deepcopy(model), "int8-outliers-32", calibration=[x])
    assert (few[0].scheme.name, few[2].scheme.name) == ("int8-outliers-32", "int8")
    assert report(few).records[1].note == "no columns are kept in 16 bits: it has 20 columns"
    with pytest.raises(ValueError, match="keeps columns in float that are found in calibration"):
        quantize_model(plain, "int8-outliers-16")


BATCH = torch.randn(3, 32)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"recipe": [GPTQ()]},
            ValueError,
            "the method gptq needs batches to run the model on: pass them as calibration",
        ),
        ({"recipe": [], "scheme": "int8-static"}, ValueError, "the scheme 'int8-static' needs batches"),
        ({"device": "cpu"}, ValueError, "device needs batches"),
        ({"resume_folder": "folder"}, ValueError, "resume_folder needs batches"),
        ({"recipe": [GPTQ()], "calibration": Calibration(MinMax())}, ValueError, "pass batches"),
        (
            {"recipe": [], "scheme": "int8-static", "input_scales": {"0": 0.1}},
            ValueError,
            "a recipe computes scales itself",
        ),
        ({"recipe": [GPTQ()], "calibration": []}, ValueError, "calibration has no batch"),
        ({"recipe": [GPTQ()], "calibration": BATCH}, TypeError, "put a single batch into a list"),
        ({"recipe": [GPTQ()], "calibration": [BATCH, "text"]}, TypeError, "batch 1 of calibration is a str"),
        ({"recipe": GPTQ(), "calibration": [BATCH]}, TypeError, "it must be a list of methods"),
        ({"recipe": [GPTQ], "calibration": [BATCH]}, TypeError, r"create an instance: GPTQ\(\)"),
        ({"observer": "mse"}, ValueError, "observer computes scales from batches"),
        (
            {"observer": "mse", "calibration": Calibration(MinMax())},
            ValueError,
            "observer computes scales from batches",
        ),
        ({"observer": "best", "calibration": [BATCH], "recipe": []}, ValueError, "observer is 'best'"),
        ({"calibration": [BATCH]}, ValueError, "calibration is for a static scheme, or for a recipe"),
        ({"calibration": [BATCH], "scheme": "int4"}, ValueError, r"'int4' multiplies in float, .* recipe=\[GPTQ\(\)\]"),
        ({"scheme": "int8-static"}, ValueError, "pass calibration=batches, which finds them, or input_scales"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = two_layers()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=message):
        quantize_model(model, **settings)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_blocks_need_weights_in_one_place() -> None:
    with pytest.raises(ValueError, match="a recipe needs weights, but the model has some on meta"):
        quantize_model(two_layers().to("meta"), calibration=[BATCH], recipe=[])
    model = accelerate.cpu_offload(two_layers(), execution_device="cpu")
    with pytest.raises(ValueError, match="a recipe needs weights, but the model has some on meta"):
        quantize_model(model, calibration=[BATCH], recipe=[])
    model = accelerate.dispatch_model(two_layers(), {"": "cpu"}, force_hooks=True)
    with pytest.raises(ValueError, match="device is given, but the model is spread over devices already"):
        quantize_model(model, calibration=[BATCH], device="cpu")
    expected = quantize_model(copy.deepcopy(model), calibration=[BATCH], recipe=[])(BATCH)
    assert expected.isfinite().all()


class WithTorchScript(nn.Module):
    """Layers around a part that was compiled by ``torch.jit.script``, whose modules have no attributes of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.GELU()))
        self.norm = nn.LayerNorm(32)
        self.after = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.norm(self.scripted(self.before(x))))
        return out


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("recipe", [None, [GPTQ()], [SmoothQuant()], [AWQ()]])
def test_parts_of_torchscript_stay_in_float(recipe: Any) -> None:
    plain, x = WithTorchScript().eval(), torch.randn(64, 32)
    model = quantize_model(copy.deepcopy(plain), recipe=recipe, calibration=None if recipe is None else [x])
    assert [record.name for record in report(model).records] == ["before", "after"]
    wanted = plain(x)
    assert (fuse(model)(x) - wanted).norm() < 0.03 * wanted.norm()
