"""nn.MultiheadAttention with its projections quantized, and PyTorch's transformer layers around it."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families.schemes import EVERY_SCHEME
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import qgemm
from qgemm.calibration import GPTQ, SmoothQuant
from qgemm.nn import QuantLinear, QuantMultiheadAttention
from qgemm.nn.attention import opened_attention

E, H, N, L, S = 24, 4, 3, 5, 7
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim and vdim": {"kdim": 16, "vdim": 40},
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True},
    "both added": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 16},
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def make(variant: str, batch_first: bool = True, **settings: Any) -> nn.MultiheadAttention:
    attention = nn.MultiheadAttention(E, H, batch_first=batch_first, **VARIANTS[variant], **settings).eval()
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return attention


def inputs_of(attention: nn.MultiheadAttention, batched: bool, same: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; ``same``: which of them are one tensor."""

    def tensor(length: int, width: int) -> Tensor:
        shape = (length,) if not batched else (N, length) if attention.batch_first else (length, N)
        return torch.randn(*shape, width).double()

    query, key, value = tensor(L, E), tensor(S, attention.kdim), tensor(S, attention.vdim)
    if same == "qkv":
        return key, key, key
    if same == "kv":
        return query, key, key
    if same == "qk":
        return key, key, value
    return query, key, value


def masks_for(query: Tensor, key: Tensor, batched: bool, batch_first: bool) -> Iterator[dict[str, Any]]:
    axis = 1 if batched and batch_first else 0
    rows, columns, batch = query.shape[axis], key.shape[axis], N if batched else 1
    padding = torch.zeros(N, columns, dtype=torch.bool)
    padding[:2, -2:] = True
    padding = padding if batched else padding[0]
    causal = torch.ones(rows, columns, dtype=torch.bool).triu(1)
    each = torch.rand(batch * H, rows, columns) > 0.7
    each[..., 0] = False  # a row without any key is NaN
    yield {}
    yield {"key_padding_mask": padding}
    yield {"attn_mask": causal}
    yield {"attn_mask": each}
    yield {"attn_mask": causal, "is_causal": True}
    yield {"attn_mask": each.double() * -3.5, "key_padding_mask": padding.double() * -2}
    yield {"attn_mask": causal, "key_padding_mask": padding, "is_causal": True}


def assert_equal(got: tuple[Tensor, Tensor | None], wanted: tuple[Tensor, Tensor | None], tolerance: float) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.shape == theirs.shape
            assert (mine - theirs).abs().max() <= tolerance


@variants
def test_attention_is_that_of_pytorch_for_every_call(variant: str) -> None:
    weights: list[dict[str, bool]] = [{"need_weights": False}, {}, {"average_attn_weights": False}]
    count = 0
    for batched, batch_first, same in itertools.product((True, False), (True, False), ("qkv", "kv", "qk", "none")):
        if same != "none" and "kdim" in VARIANTS[variant]:
            continue
        attention = make(variant, batch_first).double()
        query, key, value = inputs_of(attention, batched, same)
        for masks, wanted in itertools.product(masks_for(query, key, batched, batch_first), weights):
            with torch.no_grad():
                expected = attention(query, key, value, **masks, **wanted)
                with opened_attention(attention):
                    assert type(attention) is QuantMultiheadAttention
                    got = attention(query, key, value, **masks, **wanted)
            assert_equal(got, expected, 1e-12)
            count += 1
    assert count >= 84


@variants
@pytest.mark.parametrize("same", ["qkv", "kv", "qk", "none"])
def test_quantized_attention_is_that_of_pytorch_with_its_weights(variant: str, same: str) -> None:
    if same != "none" and "kdim" in VARIANTS[variant]:
        same = "none"
    attention = make(variant)
    query, key, value = inputs_of(attention, True, same)
    reference, quantized = copy.deepcopy(attention).double(), qgemm.quantize_model(attention, "int4").double()
    assert qgemm.report(quantized).coverage == 1
    with torch.no_grad():
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if (weight := getattr(reference, name)) is not None:
                weight.copy_(getattr(quantized, name))
        reference.out_proj.weight.copy_(quantized.out_proj.dequantize().weight)
    inputs = dict(zip((query, key, value), (x.float() for x in (query, key, value)), strict=True))
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[:, -1] = True
    with torch.no_grad():
        expected = reference(query, key, value, padding)
        got = quantized.float()(inputs[query], inputs[key], inputs[value], padding)
    assert_equal(got, expected, 1e-5)


def encoder(**settings: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2)


def transformer(**settings: Any) -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(32, 4, 2, 2, 64, **{"batch_first": True, **settings}).eval()


def calls_of_transformer(model: nn.Transformer) -> dict[str, Any]:
    source, target = torch.randn(3, 7, 32), torch.randn(3, 5, 32)
    if not model.batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    mask = model.generate_square_subsequent_mask(5).isinf()
    return {
        "src": source,
        "tgt": target,
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
        "tgt_mask": mask,
        "tgt_is_causal": True,
    }


@pytest.fixture
def no_fused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo  # which lists PyTorch's functions, once

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a fused path was taken")

    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_nested_tensor_from_mask"):
        monkeypatch.setattr(torch, name, refuse)


@pytest.mark.parametrize("scheme", EVERY_SCHEME)
@pytest.mark.usefixtures("no_fused_path")
def test_a_transformer_stays_close_under_every_scheme(scheme: str, device: torch.device) -> None:
    model = transformer().to(device)
    call = calls_of_transformer(model)
    call = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}
    with opened_attention(model), torch.no_grad():
        expected = model(**call)
    qgemm.quantize_model(model, scheme, calibration=[call] if "static" in scheme or "outliers" in scheme else None)
    report = qgemm.report(model)
    assert report.coverage == 1
    assert {record.name for record in report.records if "decoder.layers.1" in record.name} == {
        f"decoder.layers.1.{name}"
        for name in (
            "self_attn.in_proj",
            "self_attn.out_proj",
            "multihead_attn.in_proj",
            "multihead_attn.out_proj",
            "linear1",
            "linear2",
        )
    }
    with torch.no_grad():
        got = model(**call)
    assert (got - expected).norm() <= (0.2 if "int4" in scheme else 0.03) * expected.norm()


@pytest.mark.usefixtures("no_fused_path")
@pytest.mark.parametrize("settings", [{}, {"norm_first": True}, {"activation": "gelu"}, {"bias": False}])
@pytest.mark.parametrize("skip", [None, "*.self_attn", "*.linear?"])
def test_an_encoder_with_anything_quantized_takes_no_fused_path(settings: dict[str, Any], skip: str | None) -> None:
    model = encoder(**settings).eval()
    x, padding = torch.randn(3, 7, 32), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    with torch.enable_grad():  # so that the float one takes none either
        expected = model(x, src_key_padding_mask=padding)
    quantized = qgemm.quantize_model(copy.deepcopy(model), skip=skip)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = quantized(x, src_key_padding_mask=padding)
        assert (got - expected).norm() <= 0.03 * expected.norm()
    assert torch.equal(copy.deepcopy(quantized)(x, src_key_padding_mask=padding), got)


def test_float_layers_beside_quantized_ones_get_no_nested_tensors() -> None:
    model = encoder().eval()
    x, padding = torch.randn(3, 7, 32), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    with torch.enable_grad():
        expected = model(x, src_key_padding_mask=padding)
    for skip in ("layers.0", "layers.1"):
        quantized = qgemm.quantize_model(copy.deepcopy(model), skip=skip)
        with torch.no_grad():
            got = quantized(x, src_key_padding_mask=padding)
        assert (got - expected)[~padding].norm() <= 0.03 * expected.norm()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_that_is_skipped_is_as_it_was() -> None:
    model = nn.Sequential(encoder().eval(), nn.Linear(32, 8)).eval()
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if name.startswith("0")}
    classes = [type(module) for module in model[0].modules()]
    x, padding = torch.randn(3, 7, 32), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    with torch.no_grad():
        expected = model[0](x, src_key_padding_mask=padding)
        qgemm.quantize_model(model, skip="0")
        # The fused path is taken, which gives zeros where there is padding.
        assert torch.equal(model[0](x, src_key_padding_mask=padding), expected)
    assert not expected[1, 5:].any()
    after = {name: value for name, value in model.state_dict(keep_vars=True).items() if name.startswith("0")}
    assert list(after) == list(state)
    assert all(after[name] is value for name, value in state.items())
    assert [type(module) for module in model[0].modules()] == classes


@variants
def test_an_error_leaves_attention_as_it_was(variant: str) -> None:
    attention = make(variant)
    before = dict(attention.named_parameters())
    with torch.no_grad():
        attention.out_proj.weight[0, 0] = torch.nan
    text = repr(attention)
    with pytest.raises(ValueError, match=r"the weight of 'out_proj' holds NaN or Inf"):
        qgemm.quantize_model(attention)
    assert type(attention) is nn.MultiheadAttention
    assert repr(attention) == text
    after = dict(attention.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    with pytest.raises(ZeroDivisionError), opened_attention(attention):
        1 / 0  # noqa: B018
    assert type(attention) is nn.MultiheadAttention


def test_cross_attention_multiplies_the_rows_that_it_needs(device: torch.device) -> None:
    attention = qgemm.quantize_model(make("plain").to(device))
    query, key, value = (x.float().to(device) for x in inputs_of(attention, True, "none"))
    shapes: list[tuple[int, ...]] = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "quant_linear" in str(func):
                shapes.append(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        with Watching():
            got = attention(query, key, key)
            attention(key, key, value)
            attention(query, key, value)
            attention(query, query, query)
        assert shapes == [
            *[(E, E), (2 * E, E), (E, E)],
            *[(2 * E, E), (E, E), (E, E)],
            *[(E, E)] * 4,
            *[(3 * E, E), (E, E)],
        ]
        # A hook sees whole calls, which give the same bits.
        seen = []
        attention.in_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape))
        assert all(torch.equal(a, b) for a, b in zip(attention(query, key, key), got, strict=True))
    assert seen == [(N, L, 3 * E), (N, S, 3 * E)]


def test_dropout_is_that_of_training_alone() -> None:
    attention = make("plain", dropout=0.5)
    quantized = qgemm.quantize_model(copy.deepcopy(attention))
    x = torch.randn(N, L, E)
    for need_weights in (True, False):
        still = quantized.eval()(x, x, x, need_weights=need_weights)[0]
        assert torch.equal(quantized(x, x, x, need_weights=need_weights)[0], still)
        outputs = []
        for model in (attention.train(), quantized.train()):
            torch.manual_seed(0)
            outputs.append(model(x, x, x, need_weights=need_weights)[0])
        assert (outputs[0] - outputs[1]).norm() <= 0.03 * outputs[0].norm()
        assert (outputs[1] - still).norm() > 0.1 * still.norm()


def test_gradients_flow_to_every_input() -> None:
    attention = make("add_bias_kv")
    quantized = qgemm.quantize_model(copy.deepcopy(attention))
    inputs = [x.float() for x in inputs_of(attention, True, "none")]
    gradients = []
    for model in (attention, quantized):
        fresh = [x.clone().requires_grad_() for x in inputs]
        model(*fresh)[0].square().sum().backward()
        gradients.append([*(x.grad for x in fresh), model.bias_k.grad])
    for wanted, got in zip(*gradients, strict=True):
        assert (got - wanted).norm() <= 0.05 * wanted.norm()


@pytest.mark.slow
def test_it_compiles_into_one_graph() -> None:
    layer = qgemm.quantize_model(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True).eval())
    target, memory, mask = torch.randn(3, 5, 32), torch.randn(3, 7, 32), torch.ones(5, 5, dtype=torch.bool).triu(1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(target, memory, mask), layer(target, memory, mask), atol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=True)
        self.linear = nn.Linear(E, E)

    def forward(self, x: Tensor, y: Tensor, padding: Tensor) -> Tensor:
        return self.linear(self.attention(x, y, y, padding, need_weights=False)[0])


def test_symbolic_tracing_takes_it_for_a_leaf() -> None:
    model = qgemm.quantize_model(Block().eval())
    inputs = torch.randn(N, L, E), torch.randn(N, S, E), torch.arange(S) > torch.tensor([[S], [3], [5]])
    graph = torch.fx.symbolic_trace(model)
    called = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert called == ["attention", "linear"]
    assert torch.equal(graph(*inputs), model(*inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_what_it_gives_in_pytorch(dtype: torch.dtype, device: torch.device) -> None:
    for variant in VARIANTS:
        attention = make(variant).to(device)
        quantized = qgemm.quantize_model(copy.deepcopy(attention))
        query, key, value = (x.float().to(device) for x in inputs_of(attention, True, "none"))
        padding = torch.zeros(N, S, dtype=torch.bool, device=device)
        for need_weights in (True, False):
            with torch.autocast(device.type, dtype):
                wanted = attention(query, key, value, padding, need_weights)
                got = quantized(query, key, value, padding, need_weights)
            assert got[0].dtype == wanted[0].dtype == dtype
            assert (got[0] - wanted[0]).float().norm() <= 0.05 * wanted[0].float().norm()


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
    for variant in ("plain", "no bias", "kdim and vdim"):
        attention = make(variant)
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
