"""nn.MultiheadAttention in models: saved, calibrated, measured; where it stays in float, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.schemes import EVERY_SCHEME
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import qgemm
from qgemm.calibration import GPTQ, SmoothQuant
from qgemm.nn import QuantLinear
from tests.nn.test_attention import E, L, N, S, calls_of_transformer, encoder, make, transformer

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


@pytest.mark.slow(quick=["int4-channel"])
@pytest.mark.parametrize("scheme", EVERY_SCHEME)
def test_models_are_saved_and_loaded(scheme: str, tmp_path: Path) -> None:
    model = transformer(batch_first=False)
    call = calls_of_transformer(model)
    skip = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn.in_proj", "decoder.*.multihead_attn.out_proj"]
    needs_data = "static" in scheme or "outliers" in scheme
    qgemm.quantize_model(model, scheme, skip=skip, calibration=[call] if needs_data else None)
    qgemm.save_quantized(model, tmp_path)
    with torch.no_grad():
        expected = model(**call)
        for given in (transformer(batch_first=False), lambda: transformer(batch_first=False)):
            loaded = qgemm.load_quantized(tmp_path, model=given)
            assert torch.equal(loaded(**call), expected)
            assert type(loaded.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert qgemm.report(loaded) == qgemm.report(model)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(copied(**call), model(**call))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    copied.load_state_dict(loaded.state_dict())
    assert torch.equal(copied(**call), model(**call))


def test_a_failed_load_leaves_the_given_model_as_it_was(tmp_path: Path) -> None:
    model = qgemm.quantize_model(transformer())
    qgemm.save_quantized(model, tmp_path)
    given = nn.Transformer(32, 4, 2, 2, 96, batch_first=True)
    text, names = repr(given), list(given.state_dict())
    with pytest.raises(qgemm.CheckpointError, match=r"linear1"):
        qgemm.load_quantized(tmp_path, model=given)
    assert repr(given) == text
    assert list(given.state_dict()) == names


def test_calibration_sees_what_goes_into_each_projection() -> None:
    model = transformer()
    call = calls_of_transformer(model)
    inputs: dict[str, list[Tensor]] = {}
    text = repr(model)
    with qgemm.calibrate(model) as calibration:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                inputs[name] = []
                module.register_forward_pre_hook(lambda m, args, seen=inputs[name]: seen.append(args[0]))
        model(**call)
    assert repr(model) == text
    assert set(calibration.statistics) == set(inputs)
    assert [len(inputs[f"decoder.layers.0.{name}.in_proj"]) for name in ("self_attn", "multihead_attn")] == [1, 2]
    for name, seen in inputs.items():
        amax = torch.cat([x.flatten(0, -2) for x in seen]).abs().amax(0)
        assert torch.allclose(calibration.statistics[name].channel_amax, amax)
    with torch.no_grad():
        expected = model(**call)
        by_hand = qgemm.quantize_model(copy.deepcopy(model), "int8-static", calibration=calibration)
        at_once = qgemm.quantize_model(model, "int8-static", calibration=[call])
        assert torch.equal(by_hand(**call), at_once(**call))
        assert (at_once(**call) - expected)[:, :5].norm() <= 0.03 * expected.norm()


def test_recipes_work_block_by_block() -> None:
    model = transformer(norm_first=True)
    call = calls_of_transformer(model)
    with torch.no_grad():
        expected = model(**call)
    qgemm.quantize_model(model, "int8-static", calibration=[call], recipe=[SmoothQuant(), GPTQ()])
    report = qgemm.report(model)
    assert report.coverage == 1
    notes = {record.name: record.note for record in report.records}
    # A norm ahead, and the rows of values.
    assert not notes["encoder.layers.0.self_attn.in_proj"]
    assert not notes["encoder.layers.0.self_attn.out_proj"]
    assert not notes["encoder.layers.0.linear2"]
    # Its input is not only the norm's.
    assert "not scaled" in notes["decoder.layers.0.multihead_attn.in_proj"]
    with torch.no_grad():
        assert (model(**call) - expected).norm() <= 0.03 * expected.norm()


def test_sensitivity_leaves_attention_as_it_was() -> None:
    model = encoder().eval()
    text = repr(model)
    found = qgemm.sensitivity(model, [torch.randn(2, 5, 32)])
    assert {record.name for record in found.records if record.name.startswith("layers.0")} == {
        f"layers.0.{name}" for name in ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
    }
    assert repr(model) == text
    assert model.use_nested_tensor
    assert model.layers[0].activation_relu_or_gelu == 1


class Special(nn.MultiheadAttention):
    pass


def parametrized() -> nn.Module:
    return parametrizations.weight_norm(nn.MultiheadAttention(8, 2), "in_proj_weight")


def replaced() -> nn.Module:
    attention = nn.MultiheadAttention(8, 2)
    attention.forward = lambda query, key, value: (query, None)  # type: ignore[method-assign]
    return attention


def hooked() -> nn.Module:
    attention = nn.MultiheadAttention(8, 2)
    attention.register_state_dict_post_hook(lambda *args: None)
    return attention


def adapted() -> nn.Module:
    attention = nn.MultiheadAttention(8, 2)
    attention.out_proj = nn.Identity()
    return attention


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (lambda: Special(8, 2), "a subclass of nn.MultiheadAttention"),
        (parametrized, "a subclass of nn.MultiheadAttention"),
        (replaced, "its forward was replaced"),
        (hooked, "it has state-dict hooks"),
        (adapted, "its out_proj is a Identity"),
    ],
)
def test_attention_stays_in_float_where_something_knows_its_packed_weights(
    attention: Callable[[], nn.Module], reason: str
) -> None:
    model = nn.ModuleDict({"attention": attention(), "linear": nn.Linear(8, 8)})
    # A plain layer there is read by the attention all the same.
    if isinstance(model["attention"].out_proj, nn.Linear):
        model["attention"].out_proj = nn.Linear(8, 8)
    kind = type(model["attention"])
    qgemm.quantize_model(model)
    assert type(model["attention"]) is kind
    reasons = {record.name: record.reason for record in qgemm.report(model).records}
    assert reason in reasons["attention"]
    read = "its weight is read by the attention around it"
    assert reasons.get("attention.out_proj", read) == read
    assert isinstance(model["linear"], QuantLinear)


def test_float64_and_shared_weights_say_why() -> None:
    twins = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2), nn.Linear(8, 8)])
    twins[1].in_proj_weight = twins[0].in_proj_weight
    qgemm.quantize_model(twins)
    reasons = {record.name: record.reason for record in qgemm.report(twins).records}
    assert reasons["0.in_proj"] == "it shares its weight with 1.in_proj"
    assert reasons["0.out_proj"] == ""
    with pytest.raises(ValueError, match=r"its weight is torch\.float64"):
        qgemm.quantize_model(nn.MultiheadAttention(8, 2).double())


def test_on_meta_there_is_the_structure_alone() -> None:
    with torch.device("meta"):
        model = transformer()
    qgemm.quantize_model(model)
    made = qgemm.quantize_model(transformer())
    assert [(name, value.shape, value.dtype) for name, value in model.state_dict().items()] == [
        (name, value.shape, value.dtype) for name, value in made.state_dict().items()
    ]


def test_code_that_reads_packed_weights_sees_float_ones() -> None:
    for attention in (make("plain"), make("no bias"), make("kdim and vdim"), make("no bias", kdim=16)):
        before = {name: value for name, value in attention.named_parameters() if name.endswith("weight")}
        bias = attention.in_proj_bias
        qgemm.quantize_model(attention, "int8-hadamard")
        for name, weight in before.items():
            if name != "out_proj.weight":
                assert (getattr(attention, name) - weight).norm() <= 0.02 * weight.norm()
        assert (bias is None) == (attention.in_proj_bias is None)
        assert bias is None or torch.equal(attention.in_proj_bias, bias)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(L, E)}, "query, key and value have 2, 3 and 3 dimensions"),
        ({"value": torch.zeros(N, S + 1, E)}, r"key is \[3, 7, 24\] and value \[3, 8, 24\]"),
        ({"query": torch.zeros(N + 1, L, E)}, "query has a batch of 4 and key one of 3"),
        ({"attn_mask": torch.zeros(S, L)}, r"attn_mask is \[7, 5\]; it must be \[5, 7\] or \[12, 5, 7\]"),
        ({"attn_mask": torch.zeros(L, S, dtype=torch.int64)}, r"attn_mask is torch\.int64; it must be bool, or float"),
        ({"key_padding_mask": torch.zeros(S, N)}, r"key_padding_mask is \[7, 3\]; it must be \[3, 7\]"),
        ({"is_causal": True}, "is_causal is only a hint about attn_mask: pass the causal mask too"),
        (
            {"key": torch.nested.as_nested_tensor([torch.zeros(2, E)] * N, layout=torch.jagged)},
            "is a nested tensor: pad it",
        ),
    ],
)
def test_inputs_that_do_not_go_together_are_refused(change: dict[str, Any], message: str) -> None:
    attention = qgemm.quantize_model(make("plain"))
    call = {"query": torch.zeros(N, L, E), "key": torch.zeros(N, S, E), "value": torch.zeros(N, S, E)}
    with pytest.raises((ValueError, RuntimeError), match=message):
        attention(**{**call, **change})


def test_other_libraries_have_no_form_for_it(tmp_path: Path) -> None:
    model = qgemm.quantize_model(encoder().eval())
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn was an nn\.MultiheadAttention"):
        qgemm.save_quantized(model, tmp_path, format="compressed-tensors")
