import json
from pathlib import Path

import pytest
import torch
from torch import nn

import qgemm
from qgemm.model.report import LayerRecord, QuantReport, report
from qgemm.nn import QuantLinear
from qgemm.quantize import quantize_model

RECORDS = (
    LayerRecord("body.up", "Linear", "int8", "", 4096, 1280, 0.0061),
    LayerRecord("body.down", "Conv1D", "int8", "", 3000, 1000, None),
    LayerRecord("head", "Linear", "float", "output head", 904, 904, None),
)


def test_totals() -> None:
    result = QuantReport(RECORDS)
    assert (result.bytes_before, result.bytes_after) == (8000, 3184)
    assert result.coverage == pytest.approx(7096 / 8000)
    assert result.largest_error == 0.0061
    assert [record.name for record in result.quantized] == ["body.up", "body.down"]
    assert [record.name for record in result.kept] == ["head"]


def test_totals_of_nothing() -> None:
    empty = QuantReport(())
    assert (empty.coverage, empty.largest_error) == (0.0, None)
    assert "0 of 0 layers" in str(empty)


def test_the_table() -> None:
    assert str(QuantReport(RECORDS)) == "\n".join(
        [
            "layer      kind    action              before    after   error",
            "--------------------------------------------------------------",
            "body.up    Linear  int8                4.1 kB  1.28 kB  0.0061",
            "body.down  Conv1D  int8                  3 kB     1 kB",
            "head       Linear  float: output head   904 B    904 B",
            "--------------------------------------------------------------",
            "2 of 3 layers quantized, 88.7% of their bytes",
            "8 kB before, 3.18 kB after (2.51x smaller)",
            "largest relative weight error: 0.0061",
        ]
    )


@pytest.mark.parametrize(
    ("size", "shown"),
    # Each side of every unit's edge, and beyond the largest unit.
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (2_350_000_000, "2.35 GB"),
        (1_500_000_000_000, "1,500 GB"),
    ],
)
def test_sizes_are_readable(size: int, shown: str) -> None:
    row = str(QuantReport((LayerRecord("x", "Linear", "float", "why", size, 0, None),))).splitlines()[2]
    assert row.split("why")[1].strip().startswith(shown)


def test_html_escapes_what_it_shows() -> None:
    page = QuantReport((LayerRecord("a<b>", "Linear", "float", "x & y", 1, 1, None),))._repr_html_()
    assert "a&lt;b&gt;" in page
    assert "x &amp; y" in page
    assert "<b>" not in page
    assert "0 of 1 layers quantized" in page


def test_json_round_trip() -> None:
    result = QuantReport(RECORDS)
    assert QuantReport.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    # As it was before there were recipes, where there is none.
    assert set(result.to_dict()) == {"records"}
    assert {*result.to_dict()["records"][0]} == {
        "name", "kind", "action", "reason", "bytes_before", "bytes_after", "weight_error"
    }  # fmt: skip


WITH_RECIPE = QuantReport(
    (
        LayerRecord("up", "Linear", "int8", "", 4096, 1280, 0.0061, "gptq: it is singular", 0.0123),
        LayerRecord("down", "Linear", "int8", "", 4096, 1280, 0.0062),
    ),
    {"methods": [{"smoothquant": {"alpha": 0.5}}, {"gptq": {}}]},
)


def test_a_recipes_notes_and_errors_are_shown_and_stored() -> None:
    assert QuantReport.from_dict(json.loads(json.dumps(WITH_RECIPE.to_dict()))) == WITH_RECIPE
    lines = str(WITH_RECIPE).splitlines()
    assert lines[0] == "layer  kind    action  before    after   error  output  note"
    assert lines[2] == "up     Linear  int8    4.1 kB  1.28 kB  0.0061  0.0123  gptq: it is singular"
    assert lines[3] == "down   Linear  int8    4.1 kB  1.28 kB  0.0062"
    assert lines[-1] == "recipe: smoothquant, gptq"
    assert "gptq: it is singular" in WITH_RECIPE._repr_html_()
    hash(WITH_RECIPE)


def _with(**changes: object) -> dict[str, object]:
    record = {**QuantReport(RECORDS).to_dict()["records"][0], **changes}
    return {"records": [record]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "one list, 'records'"),
        ({"records": [], "more": 1}, "one list, 'records'"),
        ({"records": "abc"}, "one list, 'records'"),
        ({"records": [{"name": "x"}]}, "record 0 of the report must hold .*, and nothing else"),
        (_with(name=3), "name of record 0 of the report is 3; it must be a string"),
        (_with(bytes_before="1"), "bytes_before of record 0"),
        (_with(bytes_after=-1), "bytes_after of record 0"),
        # True is an int to isinstance.
        (_with(bytes_after=True), "bytes_after of record 0"),
        (_with(weight_error=float("nan")), "weight_error of record 0"),
        (_with(weight_error=-0.5), "weight_error of record 0"),
        (_with(weight_error=10**400), "weight_error of record 0"),
        (_with(output_error="0"), "output_error of record 0"),
        (_with(note=None), "note of record 0 of the report is None; it must be a string"),
        (_with(more=1), "and nothing else but"),
        ({"records": [], "recipe": []}, "recipe of the report must be a dictionary"),
        ({"records": [], "recipe": {"methods": ["gptq"]}}, "recipe of the report holds 'gptq'"),
        ({"records": [], "recipe": {"methods": [{"gptq": {"x": []}}]}}, "recipe of the report holds"),
    ],
)
def test_foreign_values_are_refused(values: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantReport.from_dict(values)


def test_report_returns_what_quantize_model_stored() -> None:
    model = quantize_model(nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4)), skip="2")
    result = report(model)
    assert [(record.name, record.action, record.reason) for record in result.records] == [
        ("0", "int8", ""),
        ("2", "float", "skip='2'"),
    ]
    first, last = result.records
    # 32 x 8 weights and 8 biases in float32; then int8 weights, 8 scales and the same biases.
    assert (first.bytes_before, first.bytes_after) == (4 * 256 + 32, 256 + 32 + 32)
    assert (last.bytes_before, last.bytes_after) == (4 * 32 + 16, 4 * 32 + 16)


def test_report_of_a_model_put_together_by_hand() -> None:
    layer = qgemm.QuantLinear(32, 8, bias=True, dtype=torch.bfloat16)
    (record,) = report(nn.Sequential(nn.ReLU(), layer)).records
    # Its bias tells that the float layer was bfloat16.
    assert record == LayerRecord("1", "Linear", "int8", "", 2 * (256 + 8), 256 + 32 + 16, None)


def test_report_of_layers_without_biases() -> None:
    """The rest of the model tells what they were."""
    layers = [qgemm.QuantLinear(32, 8, bias=False), qgemm.QuantExperts(4, 64, 32, scheme="int4-32")]
    linear, experts = report(nn.Sequential(*layers, nn.LayerNorm(8, dtype=torch.float16))).records
    assert linear.bytes_before == 2 * 256
    assert experts.bytes_before == 2 * 4 * (64 * 64 + 64 * 32)
    assert report(layers[0]).bytes_before == 4 * 256


def test_report_of_a_model_that_is_float_again() -> None:
    model = quantize_model(nn.Sequential(nn.Linear(16, 8)))
    model[0] = model[0].dequantize()
    with pytest.raises(ValueError, match="holds no quantized layer"):
        report(model)


def test_report_of_layers_that_changed_since_then(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))

    model = quantize_model(build(), {"3": "int4", "*": "int8"}, skip="0")
    before = {record.name: record for record in report(model).records}
    quantize_model(nn.Sequential(model[0]), "fp8")  # keeps its layer to itself
    assert report(model).records == tuple(before.values())
    model[0] = quantize_model(nn.Sequential(model[0]), "fp8")[0]
    model[1] = model[1].dequantize()
    model[2] = QuantLinear.from_linear(nn.Linear(16, 16), "fp8")
    model._modules["last"] = model._modules.pop("4")
    qgemm.save_quantized(model, tmp_path)

    def build_again() -> nn.Module:
        again = build()
        again._modules["last"] = again._modules.pop("4")
        return again

    for result in (report(model), report(qgemm.load_quantized(tmp_path, model=build_again))):
        actions = [(one.name, one.action, one.reason, one.weight_error is None) for one in result.records]
        assert actions == [
            ("0", "fp8", "", True),
            ("1", "float", "it was replaced after quantize_model", True),
            ("2", "fp8", "", True),
            ("3", "int4", "", False),
            ("last", "int8", "", True),
        ]
        assert result.records[3] == before["3"]
        assert result.records[1].bytes_after == result.records[1].bytes_before == before["1"].bytes_before


def test_report_of_a_float_model() -> None:
    with pytest.raises(ValueError, match="Sequential holds no quantized layer"):
        report(nn.Sequential(nn.Linear(4, 4)))
