"""Calibrations are merged, saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qgemm
from qgemm import Calibration, CheckpointError
from qgemm.calibration import OBSERVERS, MinMax, Percentile
from qgemm.calibration.result import METADATA

STATIC = "int8-static"


def calibrated(observer: Any, *xs: Tensor) -> Calibration:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 12), "b": nn.Sequential(nn.Linear(12, 4))})
    with qgemm.calibrate(model, observer) as calibration:
        for x in xs:
            model["b"](model["a"](x))
    return calibration


def contents(calibration: Calibration) -> dict[str, Any]:
    return {
        name: {key: value.tolist() if isinstance(value, Tensor) else value for key, value in vars(observer).items()}
        for name, observer in calibration.statistics.items()
    }


@pytest.mark.parametrize("name", ["min-max", "percentile", "mse"])
def test_merged_calibrations_are_one_pass(name: str) -> None:
    xs = [torch.randn(5, 8) * scale for scale in (1.0, 10.0, 0.1, 3.0)]
    first, second = calibrated(name, *xs[:1]), calibrated(name, *xs[1:])
    expected = calibrated(name, *xs)
    assert contents(first.merge(second)) == contents(second.merge(first)) == contents(expected)
    assert first.merge(second).input_scales(STATIC) == expected.input_scales(STATIC)
    assert first.statistics["a"].tokens == 5


def test_merging_takes_layers_that_one_has_not_seen() -> None:
    first, second = calibrated("min-max", torch.ones(2, 8)), calibrated("min-max", torch.ones(2, 8))
    del first.statistics["a"]
    merged = first.merge(second)
    assert merged.input_scales(STATIC) == second.input_scales(STATIC)


def test_what_does_not_fit_is_not_merged() -> None:
    first = calibrated("min-max", torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"MinMax\(\) can't be merged with Percentile"):
        first.merge(calibrated("percentile", torch.ones(2, 8)))
    other = Calibration(MinMax(), {"a": MinMax().update(torch.ones(1, 3))})
    with pytest.raises(ValueError, match="'a': statistics of inputs with 8 and 3 columns"):
        first.merge(other)


@pytest.mark.parametrize("observer", [*OBSERVERS, Percentile(97.5)])
def test_a_saved_calibration_comes_back(tmp_path: Path, observer: Any) -> None:
    calibration = calibrated(observer, torch.randn(5, 8), torch.randn(3, 8))
    path = tmp_path / "new" / "statistics.safetensors"
    calibration.save(path)
    loaded = Calibration.load(path)
    assert contents(loaded) == contents(calibration)
    assert type(loaded.observer) is type(calibration.observer)
    assert loaded.observer.settings == calibration.observer.settings
    assert loaded.input_scales(STATIC) == calibration.input_scales(STATIC)
    # The library reads it too, and nothing else lies there.
    assert load_file(path)["a.channel_min"].tolist() == calibration.statistics["a"].channel_min.tolist()
    assert [file.name for file in path.parent.iterdir()] == ["statistics.safetensors"]
    # It goes on where it was.
    assert loaded.merge(calibration).statistics["a"].tokens == 16


def test_a_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "statistics.safetensors"
    calibrated("moving-average", torch.ones(1, 8)).save(path)
    second = calibrated("moving-average", torch.ones(2, 8))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        second.save(path)
    assert Calibration.load(path).statistics["a"].tokens == 1
    second.save(path, overwrite=True)
    assert Calibration.load(path).statistics["a"].tokens == 2


ABOUT = {"observer": "percentile", "settings": {"percentile": 99.0}}


def sound() -> dict[str, Tensor]:
    return {
        "a.tokens": torch.tensor(3),
        "a.channel_min": -torch.ones(8),
        "a.channel_max": torch.ones(8),
        "a.counts": torch.ones(4096, dtype=torch.int64),
    }


def test_the_sound_file_of_the_tests_below_loads(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(sound(), path, {METADATA: json.dumps(ABOUT)})
    assert Calibration.load(path).statistics["a"].tokens == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a.counts": None}, "a.counts is missing"),
        ({"a.other": torch.ones(1)}, "a.other is no statistic"),
        ({"tokens": torch.tensor(3)}, "tokens is no statistic|is missing"),
        (
            {"a.counts": torch.ones(4095, dtype=torch.int64)},
            r"a.counts is torch.int64 \[4095\]; it must be torch.int64",
        ),
        ({"a.counts": torch.ones(4096)}, "a.counts is torch.float32"),
        ({"a.tokens": torch.tensor([3])}, r"a.tokens is torch.int64 \[1\]"),
        ({"a.tokens": torch.tensor(0)}, "a.tokens must be finite numbers, 1 or more"),
        ({"a.counts": torch.full((4096,), 2**62)}, "a.counts counts more than"),
        ({"a.counts": torch.full((4096,), -1)}, "a.counts must be finite numbers, 0 or more"),
        ({"a.channel_max": torch.tensor([1.0, torch.nan])}, "a.channel_max must be finite"),
        ({"a.channel_min": torch.ones(0)}, "a.channel_min must be finite"),
        ({"a.channel_max": torch.ones(7)}, r"a.channel_min must be as long as a.channel_max, and below"),
        ({"a.channel_min": torch.full((8,), 2.0)}, r"a.channel_min must be as long as a.channel_max, and below"),
        (
            {"a.channel_min": None, "a.channel_max": None, "a.channel_amax": torch.ones(8)},
            "a.channel_m.. is missing|no",
        ),
    ],
)
def test_damaged_values_are_refused(tmp_path: Path, changed: dict[str, Tensor | None], message: str) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {name: value for name, value in {**sound(), **changed}.items() if value is not None}
    save_file(tensors, path, {METADATA: json.dumps(ABOUT)})
    with pytest.raises(CheckpointError, match=message):
        Calibration.load(path)


@pytest.mark.parametrize(
    "about",
    [
        None,
        "{",
        "[" * 100_000,
        "[]",
        "3",
        json.dumps({"observer": "percentile"}),
        json.dumps({"observer": ["percentile"], "settings": {}}),
        json.dumps({"observer": "other", "settings": {}}),
        json.dumps({"observer": "percentile", "settings": {"percentile": 0}}),
        json.dumps({"observer": "percentile", "settings": {"percentile": "99"}}),
        json.dumps({"observer": "percentile", "settings": {"percentile": float("nan")}}),
        json.dumps({"observer": "percentile", "settings": {"percentile": True}}),
        json.dumps({"observer": "percentile", "settings": {"tokens": 3}}),
        json.dumps({"observer": "percentile", "settings": 3}),
    ],
)
def test_damaged_metadata_is_refused(tmp_path: Path, about: str | None) -> None:
    path = tmp_path / "x.safetensors"
    save_file(sound(), path, None if about is None else {METADATA: about})
    with pytest.raises(CheckpointError, match=r"holds no statistics|name an observer"):
        Calibration.load(path)


def test_a_flipped_bit_and_a_short_file_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    calibrated("mse", torch.ones(2, 8)).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="doesn't have the checksum"):
        Calibration.load(path)
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            Calibration.load(path)
    with pytest.raises(CheckpointError, match="No such file"):
        Calibration.load(tmp_path / "missing")


def test_scales_are_those_of_the_scheme() -> None:
    x = torch.randn(5, 8)
    calibration = calibrated("min-max", x)
    amax = x.abs().max().item()
    assert calibration.input_scales("int8-static")["a"] == amax / 127
    assert calibration.input_scales("fp8-static")["a"] == amax / 448
    assert calibration.input_scales("int8-static-asymmetric")["a"] == calibration.statistics["a"].scale_and_zero_point()


@pytest.mark.parametrize("scheme", ["int8-static-hadamard", "int8-static-outliers-16"])
def test_of_what_a_layer_quantizes_of_its_input_there_are_no_statistics(scheme: str) -> None:
    calibration = calibrated("min-max", torch.randn(5, 8))
    with pytest.raises(ValueError, match=f"'{scheme}' rotates.*a Calibration has no statistics of: pass batches"):
        calibration.input_scales(scheme)
    with pytest.raises(ValueError, match="scheme 'int8' finds scales as it runs, so it takes none: name a static"):
        calibration.input_scales("int8")


@pytest.mark.parametrize("scales", ["calibration.input_scales", "calibration"])
def test_scales_without_a_scheme_are_refused(scales: str) -> None:
    calibration = calibrated("min-max", torch.randn(5, 8))
    given: Any = {"calibration.input_scales": calibration.input_scales, "calibration": calibration}[scales]
    with pytest.raises(TypeError, match=r"pass calibration=calibration, or calibration\.input_scales\(scheme\)"):
        qgemm.quantize_model(nn.Sequential(nn.Linear(8, 8)), "fp8-static", input_scales=given)
