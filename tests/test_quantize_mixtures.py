"""quantize_model on models with experts: what is swapped, what stays and why, how far the output moves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from families.example import Example
from families.experts import ALL, inputs
from families.mixtures import MIXTURES
from families.schemes import ERRORS
from torch import Tensor, nn

from qgemm import QuantLinear, quantize_model, report
from qgemm.nn import QuantExperts
from qgemm.scheme import resolve_scheme

families = pytest.mark.parametrize("build", MIXTURES.values(), ids=MIXTURES)
# Both layouts, with biases and without, in other formats too.
IN_EVERY_FORMAT = [(family, "int8") for family in MIXTURES]
IN_EVERY_FORMAT += [
    (family, scheme) for scheme in ("int4-32", "mxfp4", "fp8", "fp8-block") for family in ("mixtral", "gpt_oss")
]


def is_head(name: str) -> bool:
    return name == "lm_head"


@pytest.mark.slow(quick=["mixtral", "gpt_oss"])
@families
@pytest.mark.filterwarnings("error:fused experts")
def test_over_95_percent_of_the_bytes_are_quantized(build: Any) -> None:
    model = build().model
    before = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    quantize_model(model)
    # Counted without the report: matrices of linear layers and experts, heads aside, and what of them is int8 now.
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    int8 = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.int8}
    matrices = {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and name not in embeddings and "conv" not in name and "A_log" not in name
    }
    matrices -= {"lm_head.weight"}
    total = sum(before.get(name.replace("gate_up_proj", "up_proj"), before.get(name, 0)) for name in matrices)
    done = sum(before.get(name.replace("gate_up_proj", "up_proj"), before.get(name, 0)) for name in int8)
    assert done > 0.95 * total
    result = report(model)
    assert all(record.reason for record in result.kept)
    assert sum(record.bytes_before for record in result.quantized) > 0.95 * sum(
        record.bytes_before for record in result.records if not is_head(record.name)
    )
    assert result.largest_error is not None
    assert result.largest_error < 0.01


@pytest.mark.slow(quick=["mixtral", "gpt_oss"])
@families
def test_output_stays_close_to_the_float_model(build: Any) -> None:
    example: Example = build()
    expected = example.output()
    quantize_model(example.model)
    out = example.output()
    assert not torch.equal(out, expected)
    # Of each token. Random routers are undecided, so that some tokens go to another expert when all else moves by 1 %.
    cosines = torch.cosine_similarity(out.flatten(0, -2), expected.flatten(0, -2))
    assert cosines.median() > 0.99


@pytest.mark.slow(quick=["mixtral-int8", "gpt_oss-mxfp4"])
@pytest.mark.parametrize(("family", "scheme"), IN_EVERY_FORMAT)
def test_each_module_of_experts_answers_as_the_float_one_did(family: str, scheme: str) -> None:
    example = MIXTURES[family]()
    calls: dict[str, tuple[Any, Tensor]] = {}
    modules = {name: m for name, m in example.model.named_modules() if name.endswith((".experts", ".mixer.experts"))}
    for name, module in modules.items():
        module.register_forward_hook(lambda _, args, out, name=name: calls.update({name: (args, out)}))
    example.output()
    wanted = dict(calls)
    quantize_model(example.model, scheme)
    quantized = {name: m for name, m in example.model.named_modules() if isinstance(m, QuantExperts)}
    assert quantized.keys() == modules.keys() == wanted.keys()
    # Of gates, ups and what they are multiplied to: errors add up at random. Those of int8 are far from their limit.
    limit = ERRORS[resolve_scheme(scheme).weight.dtype] * (1 if scheme == "int8" else 3**0.5)
    for name, module in quantized.items():
        arguments, expected = wanted[name]
        with torch.no_grad():
            out = module(*arguments)
        assert module.scheme.name == scheme
        assert (out - expected).norm() / expected.norm() < limit, name
        # Hooks went along.
        assert calls[name][1] is out


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "llama4"])
def test_generate(family: str) -> None:
    example = MIXTURES[family]()
    model: Any = quantize_model(example.model)
    ids = example.inputs["input_ids"]
    tokens = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert tokens.shape == (ids.shape[0], ids.shape[1] + 5)
    # With the cache, as without it: each token by itself gives what all of them at once gave.
    logits = Example(model, {"input_ids": tokens[:, :-1]}).output()
    assert torch.equal(logits[:, -1].argmax(-1), tokens[:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("llama4", marks=pytest.mark.complete)])
def test_compiled_in_one_graph(family: str) -> None:
    example = MIXTURES[family]()
    quantize_model(example.model)
    expected = example.output()
    torch.compiler.reset()
    compiled: Any = torch.compile(example.model, fullgraph=True, backend="aot_eager")
    assert torch.equal(Example(compiled, example.inputs).output(), expected)


def test_the_report_has_one_line_for_a_module() -> None:
    model = quantize_model(MIXTURES["gpt_oss"]().model)
    records = {record.name: record for record in report(model).records if record.kind == "GptOssExperts"}
    assert list(records) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    E, H, N = 4, 64, 96
    for record in records.values():
        assert record.action == "int8"
        assert record.bytes_before == 4 * E * (3 * H * N + 2 * N + H)
        assert record.bytes_after == E * (3 * H * N) + 4 * 2 * E * (2 * N + H)
        assert record.weight_error is not None
        assert 0.004 < record.weight_error < 0.01


def test_the_report_of_a_model_put_together_by_hand() -> None:
    model = nn.Sequential(QuantExperts.from_experts(ALL["gpt_oss"]().half()))
    (record,) = report(model).records
    assert (record.name, record.kind, record.action) == ("0", "Experts", "int8")
    assert record.bytes_before == sum(p.nbytes for p in ALL["gpt_oss"]().half().parameters())


@pytest.mark.parametrize("skip", ["model.layers.1.mlp.experts", "*.1.mlp.experts", "model.layers.1"])
@pytest.mark.filterwarnings("error:fused experts")
def test_skipped_experts(skip: str) -> None:
    model = quantize_model(MIXTURES["mixtral"]().model, skip=skip)
    kept = {record.name: record.reason for record in report(model).kept}
    assert kept["model.layers.1.mlp.experts"] == f"skip={skip!r}"
    assert isinstance(model.get_submodule("model.layers.0.mlp.experts"), QuantExperts)
    assert not isinstance(model.get_submodule("model.layers.1.mlp.experts"), QuantExperts)


@pytest.mark.filterwarnings("error:fused experts")
def test_whoever_skips_all_experts_is_not_warned() -> None:
    model = quantize_model(MIXTURES["mixtral"]().model, skip="*.experts")
    assert report(model).coverage < 0.2


def test_a_static_scheme_is_for_linear_layers() -> None:
    model = MIXTURES["mixtral"]().model
    scales = {name: 0.05 for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    with pytest.raises(ValueError, match=r"input_scales names .model\.layers\.0\.mlp\.experts."):
        quantize_model(model, "int8-static", input_scales={**scales, "model.layers.0.mlp.experts": 0.05})
    quantize_model(model, "int8-static", input_scales=scales)
    actions = {record.action for record in report(model).quantized if "experts" in record.name}
    assert actions == {"int8"}
    assert {record.action for record in report(model).quantized if record.kind == "Linear"} == {"int8-static"}


def test_experts_with_another_activation_stay_with_a_reason() -> None:
    model: Any = MIXTURES["mixtral"]().model
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = nn.Mish()
    with pytest.warns(
        UserWarning, match=r"only 14% of the bytes .* What stays in float: 83%: fused experts: its activation isn't"
    ):
        quantize_model(model)
    kept = {record.name: record.reason for record in report(model).kept}
    reason = "fused experts: its activation isn't one that qgemm computes"
    assert kept["model.layers.0.mlp.experts.gate_up_proj"] == reason
    assert kept["model.layers.1.mlp.experts.down_proj"] == reason
    assert Example(model, MIXTURES["mixtral"]().inputs).output().isfinite().all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "forward", lambda *args: args[0]), "its forward was replaced"),
        (lambda m: m.double(), "its weight is torch.float64, not float32, bfloat16 or float16"),
    ],
)
def test_what_keeps_a_linear_layer_keeps_experts(change: Any, reason: str) -> None:
    model: Any = MIXTURES["mixtral"]().model
    change(model.model.layers[0].mlp.experts)
    with warnings.catch_warnings(record=True):
        quantize_model(model)
    kept = {record.name: record.reason for record in report(model).kept}
    assert kept["model.layers.0.mlp.experts"] == reason


def test_nan_in_experts_leaves_the_model_as_it_was() -> None:
    model: Any = MIXTURES["mixtral"]().model
    model.model.layers[1].mlp.experts.down_proj.data[1, 2, 3] = torch.inf
    with pytest.raises(ValueError, match=r"the weight of 'model\.layers\.1\.mlp\.experts' holds NaN or Inf"):
        quantize_model(model)
    assert not any(isinstance(module, QuantExperts | QuantLinear) for module in model.modules())


def test_quantized_experts_are_not_quantized_again() -> None:
    model = quantize_model(MIXTURES["mixtral"]().model)
    with pytest.raises(
        ValueError, match=r"is quantized already: 8 of its layers are QuantLinear and 2 .* QuantExperts"
    ):
        quantize_model(model)


def test_experts_in_a_model_of_ones_own() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = ALL["qwen3_moe"]()
            self.again = self.experts

        def forward(self, *arguments: Tensor) -> Tensor:
            first: Tensor = self.experts(*arguments)
            return first + self.again(*arguments)

    block = Block()
    arguments = inputs(block.experts, 12)
    with torch.no_grad():
        expected = block(*arguments)
        quantize_model(block)
        out = block(*arguments)
    # One module under both of its names.
    assert isinstance(block.experts, QuantExperts)
    assert block.again is block.experts
    assert (out - expected).norm() / expected.norm() < 0.03


def test_a_model_on_meta() -> None:
    model = MIXTURES["llama4"]().model.to("meta")
    quantize_model(model)
    (record, *_) = [record for record in report(model).quantized if "experts" in record.name]
    assert record.weight_error is None
    assert record.bytes_after == 4 * (3 * 64 * 96) + 4 * 4 * (2 * 96 + 64)
