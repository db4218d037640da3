"""The benchmark of experts: both sides compute the same on a tiny model, wrong outputs are seen, rates are right."""

import pytest
import torch

from benchmarks import experts
from benchmarks.experts import LARGEST_ERRORS, Model, Result
from benchmarks.roofline import Roofline
from qgemm.nn import QuantExperts
from qgemm.nn.float_experts import describe_experts

CPU = torch.device("cpu")
SIZES = {"num_local_experts": 6, "hidden_size": 64, "intermediate_size": 96}
TINY = Model("tiny", 6, 2, 64, 96, torch.float32, "mixtral", "MixtralExperts", "MixtralConfig", SIZES)


GPT_OSS = TINY._replace(module="gpt_oss", experts_class="GptOssExperts", config_class="GptOssConfig")


@pytest.mark.parametrize("model", [TINY, GPT_OSS], ids=["mixtral", "gpt-oss"])
def test_both_sides_are_right_and_what_is_wrong_is_seen(model: Model) -> None:
    floats = experts.float_layer(model, CPU)
    routing = experts.route(model, 40, CPU)
    with torch.no_grad():
        outputs = {
            "qgemm": QuantExperts.from_experts(floats)(*routing),
            "grouped_mm": floats(*routing),
            "batched_mm": experts.by_batches(floats)(*routing),
        }
    for name, out in outputs.items():
        assert experts.largest_error(out, routing, floats) < LARGEST_ERRORS[name]
        for row in (0, 39):
            broken = out.clone()
            broken[row, 3] += 1
            assert experts.largest_error(broken, routing, floats) > LARGEST_ERRORS[name]
    broken[0, 0] = torch.nan
    assert experts.largest_error(broken, routing, floats) == torch.inf


@pytest.mark.parametrize(("scheme", "most"), [("mxfp4", experts.LARGEST_ERROR_OF_4_BITS), ("fp8", 0.16)])
def test_other_schemes(scheme: str, most: float) -> None:
    floats = experts.float_layer(TINY, CPU)
    routing = experts.route(TINY, 40, CPU)
    out = QuantExperts.from_experts(floats, scheme)(*routing)
    assert 0.01 < experts.largest_error(out, routing, floats) < most


def test_bytes_of_a_weight() -> None:
    assert experts._stored("mxfp4") == (0.5 + 1 / 32, "bf16")
    assert experts._stored("int4") == (0.5 + 2 / 128, "bf16")
    assert experts._stored("int8") == (1.0, "int8")


@pytest.mark.parametrize("model", experts.MODELS, ids=lambda model: model.name)
def test_the_modules_of_transformers_have_the_sizes(model: Model) -> None:
    layer = experts.float_layer(model, torch.device("meta"))
    source = describe_experts(layer)
    assert (source.num_experts, source.hidden_size) == (model.num_experts, model.hidden)
    assert source.intermediate_size == model.intermediate


def test_routing() -> None:
    x, index, weights = experts.route(TINY, 50, CPU)
    assert x.shape == (50, 64)
    assert index.shape == weights.shape == (50, 2)
    assert (index[:, 0] != index[:, 1]).all()
    assert 0 <= index.min() <= index.max() < 6
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(50))


def result(provider: str, us: float) -> Result:
    values = 3 * TINY.hidden * TINY.intermediate
    return experts.result(TINY, 10, provider, us / 1e6, 2 * us / 1e6, 0.01, 6.0, Roofline(1e12, {}), values)


def test_rates_and_table() -> None:
    ours, theirs = result("qgemm", 1.0), result("grouped_mm", 3.0)
    tokens = 2 * 10 * 64 * 2  # bytes, in and out
    assert ours.tb_per_s == pytest.approx((6 * 18_432 + tokens) / 1e6)
    assert theirs.tb_per_s == pytest.approx((6 * 18_432 * 2 + tokens) / 3e6)
    assert ours.tops == pytest.approx(3 * theirs.tops) == pytest.approx(2 * 20 * 18_432 / 1e6)
    assert ours.share == pytest.approx(ours.tb_per_s)
    slower = result("batched_mm", 4.0)
    header, row = experts.report([ours, theirs, slower]).splitlines()
    assert len(header.split()) == 18
    assert row.split()[:6] == ["tiny", "10", "6.0", "3.0", "1.0", "3.00"]


def test_there_is_nothing_to_time_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is none"):
        experts.main([])
