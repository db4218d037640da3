"""The plugin for vLLM, without vLLM: versions, names, what can be cut, and the product of a layer in every scheme."""

from __future__ import annotations

import sys
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgemm
from qgemm.checkpoint.manifest import Manifest
from qgemm.integrations.vllm.names import FOLDED_BIAS, for_vllm, manifest_of, scheme_of
from qgemm.integrations.vllm.products import product_of
from qgemm.integrations.vllm.sizes import Sizes
from qgemm.integrations.vllm.versions import NEWEST, OLDEST, problem_with
from qgemm.nn import QuantExperts, linear_class
from qgemm.nn.linear_layer import LinearLayer
from qgemm.scheme import SCHEMES, resolve_scheme

K, ROWS = 256, (128, 256)
OF_FAMILIES = ("int8-outliers-16", "int8-static-outliers-16", "int4-32-asymmetric-ordered", "int4-int8", "int4-channel")


@pytest.mark.parametrize("minor", [OLDEST[1], NEWEST[1]])
def test_versions_that_are_supported(minor: int) -> None:
    assert problem_with(f"0.{minor}.0") is None
    assert problem_with(f"0.{minor}.1rc2+cpu") is None


@pytest.mark.parametrize("version", [f"0.{OLDEST[1] - 1}.9", f"0.{NEWEST[1] + 1}.0", "1.30.0", "dev"])
def test_other_versions_are_named(version: str) -> None:
    assert (problem_with(version) or "").startswith(
        f"vLLM {version} isn't supported by this qgemm, which runs in 0.22 to"
    )


MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def test_merged_layers_have_the_scheme_of_their_parts() -> None:
    layers = {f"a.{part}_proj": SCHEMES["int8"] for part in "qkv"} | {"a.o_proj": SCHEMES["fp8"]}
    assert scheme_of("a.qkv_proj", layers, MERGED) == SCHEMES["int8"]
    assert scheme_of("a.o_proj", layers, MERGED) == SCHEMES["fp8"]
    assert scheme_of("lm_head", layers, MERGED) is None
    assert scheme_of("b.qkv_proj", layers, MERGED) is None
    # Merged in the files too, as Phi-3's are.
    assert scheme_of("c.qkv_proj", {"c.qkv_proj": SCHEMES["int4"]}, MERGED) == SCHEMES["int4"]


def test_mixtures_have_an_old_name_in_vllm() -> None:
    layers = {"model.layers.0.mlp.experts": SCHEMES["int8"]}
    assert scheme_of("model.layers.0.block_sparse_moe.experts", layers, MERGED) == SCHEMES["int8"]


def test_parts_of_different_schemes_are_refused_by_name() -> None:
    layers = {"a.q_proj": SCHEMES["int8"], "a.k_proj": SCHEMES["int4"]}
    with pytest.raises(ValueError, match=r"a.qkv_proj as one .*q_proj: int8, a.k_proj: int4, a.v_proj: float\)"):
        scheme_of("a.qkv_proj", layers, MERGED)


def test_tensors_that_vllm_would_refuse_or_round() -> None:
    manifest = Manifest({"a.up": SCHEMES["int8"], "a.down": SCHEMES["int8-static-asymmetric"]}, {})
    names = [
        *("a.up.weight", "a.up.bias", "a.down.weight", "a.down.bias", "a.norm.bias"),
        *("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq", "model.embed_tokens.embed_scale"),
        *("model.rotary_emb_local.inv_freq", "rotary_pos_emb.inv_freq", "model.embed_tokens.weight"),
    ]
    found = [name for name, _ in for_vllm(((name, torch.zeros(1)) for name in names), manifest)]
    assert found == [
        *("a.up.weight", "a.up.bias", "a.down.weight", f"a.down.{FOLDED_BIAS}", "a.norm.bias"),
        "model.embed_tokens.weight",
    ]


def test_weights_that_vllm_transposes() -> None:
    layers = {f"h.0.{name}": SCHEMES["int8"] for name in ("attn.c_attn", "mlp.c_proj")}
    tensors = {f"{layer}.{leaf}": torch.zeros(3, 2) for layer in layers for leaf in ("weight", "weight_scale")}
    tensors |= {"h.0.mlp.c_fc.weight": torch.zeros(3, 2), "lm_head.weight": torch.zeros(3, 2)}  # in float
    found = dict(for_vllm(tensors.items(), Manifest(layers, {}), transposes=True))
    swapped = [name for name, tensor in found.items() if tensor.shape == (2, 3)]
    assert swapped == ["h.0.attn.c_attn.weight", "h.0.mlp.c_proj.weight"]
    assert all(tensor.shape == (3, 2) for _, tensor in for_vllm(tensors.items(), Manifest(layers, {})))


def test_experts_are_given_what_is_theirs() -> None:
    layers = [f"model.layers.{i}.mlp.experts" for i in range(2)]
    stored = QuantExperts(2, 32, 16, bias=True, scheme="nvfp4").state_dict()
    tensors = [(f"{layer}.{name}", value) for layer in layers for name, value in stored.items()]
    router = ("model.layers.0.mlp.router.weight", torch.zeros(1))
    manifest, taken = Manifest(dict.fromkeys(layers, SCHEMES["nvfp4"]), {}), {}
    # The second layer is another rank's.
    given = for_vllm([*tensors, router], manifest, {layers[0]: taken.__setitem__})
    assert [name for name, _ in given] == [router[0]]
    assert taken == dict(stored.items())
    # Those in float stay as they are.
    assert [name for name, _ in for_vllm(iter(tensors), Manifest({}, {}))] == [name for name, _ in tensors]


def test_mixtures_get_their_old_names_in_vllm() -> None:
    tensors = [(f"model.layers.0.mlp.{name}.weight", torch.zeros(1)) for name in ("gate", "experts.1.w1")]
    found = [name for name, _ in for_vllm(tensors, Manifest({}, {}), old_mixture=True)]
    assert found == [f"model.layers.0.block_sparse_moe.{name}.weight" for name in ("gate", "experts.1.w1")]


def test_the_manifest_is_found_in_a_config() -> None:
    values = Manifest({"a.up": SCHEMES["int8"]}, {}).to_dict()
    assert manifest_of(SimpleNamespace(quantization_config=values)) == Manifest({"a.up": SCHEMES["int8"]}, {})
    assert manifest_of(SimpleNamespace(text_config=SimpleNamespace(quantization_config=values))) is not None
    assert manifest_of(SimpleNamespace(quantization_config={"quant_method": "fp8"})) is None
    assert manifest_of(SimpleNamespace()) is None


def sizes_of(scheme: str, own_K: int = K, whole_K: int = K, rows: tuple[int, ...] = ROWS) -> Sizes:
    return Sizes("model.layers.0.mlp.down_proj", resolve_scheme(scheme), own_K, whole_K, rows)


@pytest.mark.parametrize("scheme", ["int8", "int8-static-asymmetric", "int8-outliers-16", "int4-channel", "fp8"])
def test_rows_with_one_scale_can_be_cut_anywhere(scheme: str) -> None:
    sizes_of(scheme, 48, 96).check()


@pytest.mark.parametrize(
    ("scheme", "own_K", "whole_K", "rows", "why"),
    [
        ("int4", 192, 384, (64,), "192 of 384 columns don't end with a group of 128"),
        ("nvfp4", 24, 48, (64,), "24 of 48 columns don't end with a group of 16"),
        ("fp8-block", 192, 384, (128,), "192 of 384 columns don't end with a group of 128"),
        ("fp8-block", 384, 384, (64, 128), r"parts of \[64, 128\] rows don't end with a block of 128"),
        ("int4-32-ordered", 64, 128, (64,), "its columns are in an order of their own"),
        ("int8-hadamard", 192, 384, (64,), "its input is rotated in blocks of 128"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    scheme: str, own_K: int, whole_K: int, rows: tuple[int, ...], why: str
) -> None:
    sizes = sizes_of(scheme, own_K, whole_K, rows)
    with pytest.raises(ValueError, match=f"model.layers.0.mlp.down_proj in '{scheme}' so: {why}; choose another"):
        sizes.check()
    sizes_of(scheme, 384, 384, (128, 64)).check()  # uncut


def test_factors_of_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"doesn't compute model\.layers\.0\.mlp\.down_proj in 'nvfp4-prescaled'"):
        sizes_of("nvfp4-prescaled").check()


def layers_of(scheme: str, bias: bool) -> list[LinearLayer]:
    kind, made = linear_class(scheme), []
    for rows in ROWS:
        options: dict[str, Any] = {}
        if resolve_scheme(scheme).outlier_columns:
            options["outlier_columns"] = torch.randperm(K)[: resolve_scheme(scheme).outlier_columns].sort().values
        if resolve_scheme(scheme).is_static:
            options["input_scale"] = (0.03, 7) if "asymmetric" in scheme else 0.03
        made.append(kind.from_linear(nn.Linear(K, rows, bias=bias), scheme=resolve_scheme(scheme), **options))
    return made


def merged(layers: list[LinearLayer], sizes: Sizes, same: bool) -> nn.Module:
    """As the plugin has them in vLLM: rows one below the other, and what is shared once, or once for each part."""
    holder = nn.Module()
    for name, first in layers[0]._parameters.items():
        values = [layer.stored(name).detach() for layer in layers]
        if name == "bias":
            name = FOLDED_BIAS
        rows = first is not None and name in (*layers[0].row_names, FOLDED_BIAS)
        made = None if first is None else torch.cat(values) if rows else values[0] if same else torch.stack(values)
        holder.register_parameter(name, None if made is None else nn.Parameter(made, requires_grad=False))
    return holder


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", [*SCHEMES, *OF_FAMILIES])
def test_a_merged_product_is_that_of_its_layers(scheme: str, bias: bool) -> None:
    layers, sizes, x = layers_of(scheme, bias), sizes_of(scheme), torch.randn(5, K)
    for layer in layers[1:]:
        for name in (*layer.shared_names, "outlier_columns"):
            if (value := layers[0]._parameters.get(name)) is not None:
                setattr(layer, name, value)
    own = torch.cat([layer.stored("bias") for layer in layers]).detach() if bias else None
    out = product_of(sizes.scheme, sizes, 1)(merged(layers, sizes, True), x, own)
    assert_close(out, layers, x)


@pytest.mark.parametrize("scheme", ["nvfp4", "int8-static-asymmetric", *OF_FAMILIES[:3]])
def test_parts_that_differ_are_products_of_their_own(scheme: str) -> None:
    layers, sizes, x = layers_of(scheme, True), sizes_of(scheme), torch.randn(5, K)
    if (scale := layers[1]._parameters.get("input_scale")) is not None:
        scale.data.mul_(0.5)
    own = torch.cat([layer.stored("bias") for layer in layers]).detach()
    out = product_of(sizes.scheme, sizes, len(ROWS))(merged(layers, sizes, False), x, own)
    assert_close(out, layers, x)


def assert_close(out: Tensor, layers: list[LinearLayer], x: Tensor) -> None:
    for layer, (start, stop) in zip(layers, pairwise(accumulate(ROWS, initial=0)), strict=True):
        torch.testing.assert_close(out[:, start:stop], layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", ["0.30.0", "9.9.9"])
def test_a_vllm_with_other_insides_starts_without_the_plugin(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM calls all plugins, whatever model it serves, and catches nothing.
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    from qgemm.integrations import vllm

    with pytest.warns(UserWarning, match=rf"vLLM {version} isn't built as this qgemm .* serves no model of qgemm's"):
        vllm.register()


def test_the_entry_point_is_declared() -> None:
    text = (Path(qgemm.__file__).parent.parent / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nqgemm = "qgemm.integrations.vllm:register"\n' in text
    from qgemm.integrations import vllm

    assert callable(vllm.register)
