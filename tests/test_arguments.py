"""Whatever a public function is given, what is wrong with it is one sentence of qgemm's own, and names the argument."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgemm
from qgemm.calibration import Budget
from qgemm.nn import QuantExperts, QuantLinear
from qgemm.numerics.formats import INT8

PACKAGE = str(Path(qgemm.__file__).parent)
X = [torch.ones(4, 32)]
# Mistakes of every kind; a function is told below which of them it may take.
MISTAKES: dict[str, Any] = {
    "None": None,
    "int": 3,
    "negative": -1,
    "float": 2.5,
    "bool": True,
    "str": "nonsense",
    "list": ["x"],
    "numbers": [3],
    "empty": [],
    "dict": {"a": 1},
    "dtype": torch.int8,
    "object": object(),
    "module": nn.ReLU(),
    "tensor": torch.zeros(2),
    "bytes": b"x",
    "function": lambda: 3,
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))


def _calibrate(model: Any, **options: Any) -> None:
    with qgemm.calibrate(model, **options):
        pass


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "quantize_model, model": (qgemm.quantize_model, ""),
    "quantize_model, scheme": (lambda bad: qgemm.quantize_model(net(), bad), ""),
    "quantize_model, scheme of a pattern": (lambda bad: qgemm.quantize_model(net(), {"*": bad}), ""),
    "quantize_model, skip": (lambda bad: qgemm.quantize_model(net(), skip=bad), "None empty"),
    "quantize_model, include": (lambda bad: qgemm.quantize_model(net(), include=bad), "None empty"),
    "quantize_model, input_scales": (lambda bad: qgemm.quantize_model(net(), "int8-static", input_scales=bad), ""),
    "quantize_model, an input scale": (
        lambda bad: qgemm.quantize_model(net(), "int8-static", input_scales={"0": bad, "1": 1.0}),
        "int float bool",
    ),
    "quantize_model, calibration": (lambda bad: qgemm.quantize_model(net(), "int8-static", calibration=bad), ""),
    "quantize_model, a batch": (
        lambda bad: qgemm.quantize_model(net(), "int8-static", calibration=[bad]),
        "dict empty tensor",  # the model's own error
    ),
    "quantize_model, observer": (
        lambda bad: qgemm.quantize_model(net(), "int8-static", calibration=X, observer=bad),
        "None",
    ),
    "quantize_model, recipe": (lambda bad: qgemm.quantize_model(net(), calibration=X, recipe=bad), "empty"),
    "quantize_model, device": (lambda bad: qgemm.quantize_model(net(), calibration=X, device=bad), ""),
    "quantize_model, resume_folder": (
        lambda bad: qgemm.quantize_model(net(), calibration=X, recipe=[], resume_folder=bad),
        "None str",
    ),
    "quantize_model, budget": (lambda bad: qgemm.quantize_model(net(), calibration=X, budget=bad), ""),
    "quantize_model, sensitivity": (
        lambda bad: qgemm.quantize_model(net(), calibration=X, budget=Budget(error=1.0), sensitivity=bad),
        "None",
    ),
    "Budget, bytes": (lambda bad: Budget(bytes=bad), "int float"),
    "Budget, kl": (lambda bad: Budget(kl=bad), "int float"),
    "calibrate, model": (_calibrate, ""),
    "calibrate, observer": (lambda bad: _calibrate(net(), observer=bad), ""),
    "sensitivity, model": (lambda bad: qgemm.sensitivity(bad, X), ""),
    "sensitivity, data": (lambda bad: qgemm.sensitivity(net(), bad), ""),
    "sensitivity, schemes": (lambda bad: qgemm.sensitivity(net(), X, bad), ""),
    "report": (qgemm.report, ""),
    "save_quantized, model": (lambda bad: qgemm.save_quantized(bad, "folder"), ""),
    "save_quantized, folder": (lambda bad: qgemm.save_quantized(qgemm.quantize_model(net()), bad), "str"),
    "save_quantized, max_shard_size": (
        lambda bad: qgemm.save_quantized(qgemm.quantize_model(net()), "folder", max_shard_size=bad),
        "int",
    ),
    "load_quantized, folder": (lambda bad: qgemm.load_quantized(bad, model=net()), ""),
    "load_quantized, scheme": (lambda bad: qgemm.load_quantized("folder", model=net(), scheme=bad), "None"),
    "load_quantized, device": (lambda bad: qgemm.load_quantized("folder", bad, model=net()), ""),
    "QuantLinear, in_features": (lambda bad: QuantLinear(bad, 8), "int"),
    "QuantLinear, out_features": (lambda bad: QuantLinear(8, bad), "int"),
    "QuantLinear, scheme": (lambda bad: QuantLinear(8, 8, scheme=bad), "None"),
    "QuantLinear, dtype": (lambda bad: QuantLinear(8, 8, dtype=bad), "None"),
    "QuantLinear.from_linear": (QuantLinear.from_linear, ""),
    "QuantLinear.from_linear, input_scale": (
        lambda bad: QuantLinear.from_linear(nn.Linear(8, 8), "int8-static", bad),
        "int float bool",
    ),
    "QuantExperts, hidden_size": (lambda bad: QuantExperts(2, bad, 8), "int"),
    "QuantExperts, dtype": (lambda bad: QuantExperts(2, 8, 8, dtype=bad), "None"),
    "QuantExperts.from_experts": (QuantExperts.from_experts, ""),
    "QuantScheme.from_dict": (qgemm.QuantScheme.from_dict, ""),
    "Calibration.load": (qgemm.Calibration.load, ""),
    "quantize_checkpoint, source": (lambda bad: qgemm.quantize_checkpoint(bad, "new"), ""),
    "quantize_checkpoint, device": (lambda bad: qgemm.quantize_checkpoint("folder", "new", device=bad), ""),
    "QGemmConfig, scheme": (lambda bad: qgemm.QGemmConfig(bad), "None"),
    "QGemmConfig, input_scales": (lambda bad: qgemm.QGemmConfig(input_scales=bad), "None dict"),
    "QGemmConfig.from_dict": (lambda bad: qgemm.QGemmConfig.from_dict(bad), ""),
}


@pytest.mark.parametrize("call", CALLS)
def test_mistaken_arguments_are_answered_with_a_sentence(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, taken = CALLS[call]
    for name, mistake in MISTAKES.items():
        if name in taken.split():
            continue
        with pytest.raises((ValueError, TypeError, OSError)) as caught:
            function(mistake)
        # Raised on purpose, by a line of qgemm: not what some library says that got it by accident.
        last = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert last.filename.startswith(PACKAGE), f"{name}: {caught.value!r} of {last.filename}:{last.lineno}"
        assert "raise" in (last.line or ""), f"{name}: {caught.value!r}, {last.line}"
        assert " " in str(caught.value)


@pytest.mark.parametrize("scheme", ["int8", "int8-hadamard", "int4", "int8-static-asymmetric", "int8-outliers-16"])
@pytest.mark.parametrize("x", [[1.0] * 32, None, 3, "x"])
def test_the_input_of_a_layer_is_a_tensor(scheme: str, x: Any) -> None:
    from families.schemes import quantized_layer

    with pytest.raises(TypeError, match=f"the layer's input is a {type(x).__name__}; it must be a tensor"):
        quantized_layer(nn.Linear(32, 8), scheme)(x)


def test_values_for_a_model_are_to_be_loaded_into_one() -> None:
    with pytest.raises(TypeError, match=r"an OrderedDict; it must be an nn\.Module: make the model, and load these"):
        qgemm.quantize_model(net().state_dict())


def test_a_folders_name_for_a_model_says_what_takes_one() -> None:
    with pytest.raises(TypeError, match=r"model is 'gpt2', a str; .* or pass a folder's path to qgemm.quantize_ch"):
        qgemm.quantize_model("gpt2")  # type: ignore[type-var]
    with pytest.raises(TypeError, match="make one of that class first"):
        qgemm.quantize_model(nn.Linear)  # type: ignore[type-var]


def test_budgets_of_bytes_as_text() -> None:
    assert Budget(bytes="2GB").bytes == 2 * 10**9
    assert Budget(bytes="1.5 MiB").bytes == 3 * 2**19
    assert Budget(bytes="2GB") == Budget(bytes=2 * 10**9)
    with pytest.raises(ValueError, match="bytes is 'plenty'"):
        Budget(bytes="plenty")
    model = qgemm.quantize_model(net(), calibration=X, budget=Budget(bytes="3KB"))
    assert sum(p.nbytes for p in model.parameters()) <= 3000


def test_sums_that_int32_cannot_hold_are_refused_as_a_layer_is_made() -> None:
    with pytest.raises(ValueError, match=f"in_features is {INT8.max_k + 1}; int32 sums hold up to {INT8.max_k}"):
        QuantLinear(INT8.max_k + 1, 1)
    QuantLinear(INT8.max_k, 1, device="meta")
    # Packed weights are multiplied in float.
    qgemm.nn.WeightOnlyLinear(INT8.max_k + 1, 1, scheme="int4", device="meta")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_saving_where_a_file_is(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = qgemm.quantize_model(net())
    with pytest.raises(NotADirectoryError, match=r"file is a file: name a folder"):
        qgemm.save_quantized(model, tmp_path / place)
    with pytest.raises(NotADirectoryError, match=r"resume_folder is .* is a file"):
        qgemm.quantize_model(net(), calibration=X, recipe=[], resume_folder=tmp_path / place)
    with pytest.raises(NotADirectoryError, match=r"destination is .* is a file"):
        qgemm.quantize_checkpoint(tmp_path, tmp_path / place)


@pytest.mark.parametrize("device", ["cuda:99", "meta", "mps", "tpu", torch.device("meta")])
def test_a_device_that_is_not_there_is_named(device: Any, tmp_path: Path) -> None:
    qgemm.save_quantized(qgemm.quantize_model(net()), tmp_path / "int8")
    for call in (
        lambda: qgemm.quantize_model(net(), calibration=X, recipe=[], device=device),
        lambda: qgemm.load_quantized(tmp_path / "int8", device, model=net()),
        lambda: qgemm.quantize_checkpoint(tmp_path, tmp_path / "new", device=device),
    ):
        with pytest.raises(ValueError, match=f'device is "{device}"; it must be "cpu", or "cuda" where'):
            call()


def test_a_batch_that_brings_no_tensor_names_the_layer() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match="the input of 'layer' is a list; a layer's input must be a tensor"):
        qgemm.quantize_model(Takes(), "int8-static", calibration=[([1.0, 2.0],)])
