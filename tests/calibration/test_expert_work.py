"""Methods on fused experts: each expert by the tokens that it saw, and what the report says of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families.mixtures import MIXTURES
from torch import Tensor, nn

import qgemm
from calibration.blocks import block_of
from qgemm.calibration import AWQ, GPTQ, Block, Method, MSEWeights, SmoothQuant
from qgemm.calibration.expert_work import MIN_TOKENS
from qgemm.calibration.gptq import gptq
from qgemm.calibration.method import ExpertsWork
from qgemm.calibration.rounding import mse_scale, round_by_mse
from qgemm.kernels import quantize_rows
from qgemm.model.selection import select_layers
from qgemm.nn import QuantExperts
from qgemm.nn.float_experts import describe_experts
from qgemm.scheme import INT8_ROWS, SCHEMES, resolve_scheme

# Gates before ups; gates and ups in turn, transposed, with biases; rows for each expert.
FAMILIES = ["mixtral", "gpt_oss", "llama4"]


def experts_block(family: str, tokens: int = 600, scheme: str = "int8", **more: Any) -> tuple[Any, Block]:
    model = MIXTURES[family]().model
    ids = torch.randint(5, 97, (tokens // 20, 20))
    block = block_of(model, {"input_ids": ids, **more})
    for layer in select_layers(model, None):
        if layer.is_experts and not layer.reason:
            block.experts[layer.name] = ExpertsWork(layer.name, model.get_submodule(layer.name), resolve_scheme(scheme))
    assert block.experts
    return model, block


def rows_by_hand(block: Block, work: ExpertsWork) -> list[tuple[Tensor, Tensor]]:
    """Of each expert, the inputs of both products, by a loop over tokens."""
    source = describe_experts(work.module)
    calls: list[dict[str, Tensor]] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(dict(zip(("hidden_states", "top_k_index"), args, strict=False)) | kwargs)

    handle = work.module.register_forward_pre_hook(keep, with_kwargs=True)
    block.outputs()
    handle.remove()
    inputs = []
    for expert in range(source.num_experts):
        rows = []
        for call in calls:
            hidden = call["hidden_states"]
            if source.takes_sorted_rows:
                rows += [row for row in hidden.chunk(source.num_experts)[expert] if row.any()]
            else:
                chosen = call["top_k_index"].tolist()
                rows += [row for row, index in zip(hidden, chosen, strict=True) if expert in index]
        x = torch.stack(rows)
        first = source.rows_of("gate_up_proj", work.module.get_parameter(source.parameters["gate_up_proj"]), expert)
        h = x @ first.T
        if source.has_bias:
            bias = work.module.get_parameter(source.parameters["gate_up_proj_bias"])
            h = h + source.bias_of("gate_up_proj", bias)[expert]
        inputs.append((x, source.activation(h)))
    return inputs


@pytest.mark.slow(quick=["mixtral"])
@pytest.mark.parametrize("method", [GPTQ(), GPTQ(mse=False, act_order=False), AWQ(), MSEWeights(by_input=True)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_each_expert_is_decided_by_its_own_tokens(family: str, method: Method) -> None:
    _, block = experts_block(family)
    block.layers = {}  # AWQ scales those, and experts with them
    method.apply(block)
    for work in block.experts.values():
        source = describe_experts(work.module)
        inputs = rows_by_hand(block, work)
        assert work.weights is not None
        gained = 0.0
        for expert, both in enumerate(inputs):
            for name, x in zip(("gate_up_proj", "down_proj"), both, strict=True):
                weight = source.rows_of(name, work.module.get_parameter(source.parameters[name]), expert).detach()
                moment = x.T @ x / len(x)
                if isinstance(method, GPTQ):
                    scale = mse_scale(weight, INT8_ROWS, moment.diagonal()) if method.mse else None
                    wanted = gptq(weight, moment, INT8_ROWS, scale=scale, act_order=method.act_order).weight
                else:
                    wanted = round_by_mse(weight, moment, INT8_ROWS)
                values, scale = work.weights[name].values[expert], work.weights[name].scale[expert]
                # A last digit of a moment may decide now and then.
                assert (values != wanted.values).float().mean() < 0.01
                assert ((scale - wanted.scale).abs() > 1e-6 * scale).float().mean() < 0.02
                q, nearest = quantize_rows(weight)
                lost, before = (
                    (x @ (a * b[:, None] - weight).T).square().sum() for a, b in ((values, scale), (q, nearest))
                )
                gained += float(1 - lost / before)
        assert gained > 0
        counts = [len(x) for x, _ in inputs]
        assert work.notes == [
            f"{method.name}: {len(inputs)} of {len(inputs)} experts, which saw {min(counts)} to {max(counts)} tokens"
        ]


def test_without_data_scales_are_those_of_least_error() -> None:
    _, block = experts_block("gpt_oss")
    block.calls = []
    MSEWeights().apply(block)
    for work in block.experts.values():
        source = describe_experts(work.module)
        assert work.weights is not None
        assert work.notes == [f"mse-weights: {source.num_experts} of {source.num_experts} experts"]
        weight = source.rows_of("down_proj", work.module.down_proj, 1).detach()
        assert torch.equal(work.weights["down_proj"].scale[1], mse_scale(weight, INT8_ROWS))


def test_awq_leaves_experts_to_another_method_if_it_does_not_clip() -> None:
    _, block = experts_block("mixtral", tokens=60)
    AWQ(clip=False).apply(block)
    assert all(work.weights is None for work in block.experts.values())


def test_weights_that_were_decided_before_their_inputs_changed_are_taken_back() -> None:
    _, block = experts_block("qwen2_moe")  # a norm is before experts and linear layers
    GPTQ().apply(block)
    assert all(work.decided for work in block.experts.values())
    SmoothQuant(0.5).apply(block)
    for work in block.experts.values():
        assert not work.decided
        assert work.notes[-1].startswith("its weight was decided before a later method changed what is rounded")


def test_experts_with_few_tokens_are_rounded_to_nearest_and_said() -> None:
    _, block = experts_block("mixtral", tokens=60)
    [first, *_] = block.experts.values()
    counts = [len(x) for x, _ in rows_by_hand(block, first)]
    few = [expert for expert, count in enumerate(counts) if count < MIN_TOKENS]
    assert 0 < len(few) < len(counts), counts
    GPTQ().apply(block)
    source = describe_experts(first.module)
    assert first.weights is not None
    for expert in few:
        q, scale = quantize_rows(source.rows_of("down_proj", first.module.down_proj.detach(), expert))
        assert torch.equal(first.weights["down_proj"].values[expert], q)
        assert torch.equal(first.weights["down_proj"].scale[expert], scale)
    [note] = first.notes
    assert note.startswith(f"gptq: {len(counts) - len(few)} of {len(counts)} experts, which saw {min(counts)} to")
    assert note.endswith(f"with fewer than 32 tokens, or no gain: {', '.join(map(str, few))}")


@pytest.mark.slow(quick=["mixtral"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_no_token_of_an_expert(family: str) -> None:
    mask = torch.ones(30, 20, dtype=torch.int64)
    mask[:, 12:] = 0
    model, block = experts_block(family, attention_mask=mask)
    MSEWeights(by_input=True).apply(block)
    plain = copy.copy(block)
    plain.experts = {name: ExpertsWork(name, model.get_submodule(name), SCHEMES["int8"]) for name in block.experts}
    plain.calls = [type(call)((), {"input_ids": call.kwargs["input_ids"][:, :12]}) for call in block.calls]
    MSEWeights(by_input=True).apply(plain)
    for name, work in block.experts.items():
        assert work.notes == plain.experts[name].notes


@pytest.mark.slow(quick=["mixtral"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", pytest.param("llama4", marks=pytest.mark.complete)])
def test_models_with_decided_experts_are_saved_loaded_and_resumed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(5, 97, (30, 20))
    recipe = [SmoothQuant(), GPTQ()]

    def quantized(**settings: Any) -> Any:
        model = MIXTURES[family]().model
        return qgemm.quantize_model(
            model,
            calibration=[{"input_ids": part} for part in ids.split(10)],
            recipe=recipe,
            progress=False,
            **settings,
        )

    model, plain = quantized(), MIXTURES[family]().model
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        qgemm.quantize_model(plain)
        # Of most tokens: a few go to other experts, whatever is rounded.
        errors = [(each(input_ids=ids).logits - expected).norm(dim=-1).median() for each in (model, plain)]
    assert errors[0] < 1.1 * errors[1]
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        if isinstance(one, QuantExperts) and isinstance(other, QuantExperts):
            assert not torch.equal(one.stored("down_proj"), other.stored("down_proj"))  # which takes no scales
    notes = [record.note for record in qgemm.report(model).quantized if record.kind.endswith("Experts")]
    assert notes
    assert all("gptq: " in note and "tokens" in note and "nearest" not in note.split(";")[0] for note in notes)
    apply = GPTQ.apply

    def stop(self: GPTQ, block: Block) -> None:
        if block.name.endswith("1"):
            raise KeyboardInterrupt
        apply(self, block)

    with monkeypatch.context() as patch:
        patch.setattr(GPTQ, "apply", stop)
        with pytest.raises(KeyboardInterrupt):
            quantized(resume_folder=tmp_path / "blocks")
    resumed = quantized(resume_folder=tmp_path / "blocks")
    qgemm.save_quantized(model, tmp_path / "saved")
    for other in (resumed, qgemm.load_quantized(tmp_path / "saved")):
        left, right = model.state_dict(), other.state_dict()
        assert list(left) == list(right)
        assert all(torch.equal(left[name], right[name]) for name in left)
        assert qgemm.report(other) == qgemm.report(model)
        assert any(isinstance(module, QuantExperts) for module in other.modules())


@pytest.mark.parametrize(
    ("family", "scheme"), [("gpt_oss", "mxfp4"), ("gpt_oss", "int4-32"), ("mixtral", "fp8"), ("gpt_oss", "fp8-block")]
)
@torch.no_grad()
def test_gptq_of_experts_in_other_formats(family: str, scheme: str) -> None:
    _, block = experts_block(family, scheme=scheme)
    GPTQ().apply(block)
    for work in block.experts.values():
        source, plain = describe_experts(work.module), QuantExperts.from_experts(work.module, scheme)
        assert work.weights is not None
        [note] = work.notes
        assert "nearest" not in note
        decided = copy.deepcopy(plain)
        for name, weight in work.weights.items():
            decided.fill(name, work.module.get_parameter(source.parameters[name]), source, weight.parts)
        losses = {"gate_up_proj": [0.0, 0.0], "down_proj": [0.0, 0.0]}
        for expert, both in enumerate(rows_by_hand(block, work)):
            for (name, sums), x in zip(losses.items(), both, strict=True):
                weight = source.rows_of(name, work.module.get_parameter(source.parameters[name]), expert)
                for place, layer in enumerate((decided, plain)):
                    own = layer.linear_of(name, expert).dequantize(torch.float32).weight
                    sums[place] += float((x @ (own - weight).T).square().sum())
        for one, other in losses.values():
            assert one < 0.7 * other


@pytest.mark.parametrize("scheme", ["int4-32-asymmetric", "nvfp4"])
def test_experts_in_other_formats(scheme: str) -> None:
    outputs = []
    for recipe in (None, [GPTQ()]):
        example = MIXTURES["mixtral"]()
        wanted = example.output()
        options = {} if recipe is None else {"recipe": recipe, "calibration": [example.inputs]}
        qgemm.quantize_model(example.model, scheme, progress=False, **options)
        outputs.append(float((example.output() - wanted).norm()))
    assert outputs[1] < 0.8 * outputs[0]


@pytest.mark.parametrize(
    ("scheme", "by_awq"), [("int4", 0.85), ("fp8", 0.95), pytest.param("mxfp4", 1.0, marks=pytest.mark.complete)]
)
def test_methods_help_experts_in_other_schemes(scheme: str, by_awq: float) -> None:
    """Experts alone are quantized; AWQ helps little where scales are powers of 2."""
    ids = torch.randint(5, 97, (40, 24))
    batches = [{"input_ids": part} for part in ids.split(10)]
    with torch.no_grad():
        expected = MIXTURES["mixtral"]().model(input_ids=ids).logits
    errors = []
    for recipe in ([], [MSEWeights()], [AWQ()]):
        model = MIXTURES["mixtral"]().model
        settings: dict[str, Any] = {"calibration": batches, "recipe": recipe} if recipe else {}
        qgemm.quantize_model(model, scheme, skip="*.self_attn.*", progress=False, **settings)
        with torch.no_grad():
            errors.append(float((model(input_ids=ids).logits - expected).norm(dim=-1).median()))
        experts = next(module for module in model.modules() if isinstance(module, QuantExperts))
        assert experts.scheme.name == scheme
    plain, by_error, by_activations = errors
    assert by_error < plain
    assert by_activations < by_awq * plain
