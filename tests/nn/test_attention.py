"""nn.MultiheadAttention with its projections quantized, and PyTorch's transformer layers around it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families.schemes import EVERY_SCHEME
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import qgemm
from qgemm.nn import QuantMultiheadAttention
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
    limit = 0.2 if "int4" in scheme else 0.08 if scheme.startswith("fp8") else 0.03
    assert (got - expected).norm() <= limit * expected.norm()


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
@variants
def test_safetensors_own_functions_save_and_load_it(variant: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    skip = "0.k_proj" if "kdim" in VARIANTS[variant] else None  # which stays in float beside the others
    saved = qgemm.quantize_model(nn.ModuleList([make(variant)]), skip=skip)
    save_model(saved, str(path))
    loaded = qgemm.quantize_model(nn.ModuleList([make(variant)]), skip=skip)
    load_model(loaded, str(path))
    for (name, value), other in zip(saved.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


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
