"""In which order parts of a layer may follow one another: that of its code is among those found."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from qgemm.fusion.orders import Norms, is_of_other_form, norms_of_cross, orders_of_parts

# Code of a layer with attention ``attn``, ``mlp``, and norms ``a``, ``b``, ``c``, ``d``; what it computes.
LAYERS: dict[str, Norms] = {
    "h = self.a(x); return x + self.attn(h) + self.mlp(h)": Norms("a", form="side by side"),
    "h, i = self.a(x), self.b(x); return x + self.attn(h) + self.mlp(i)": Norms("a", "", "b", form="side by side"),
    "h = self.attn(self.a(x)); return x + h + self.mlp(self.b(x))": Norms("a", "", "b"),
    "h = self.a(x); x = x + self.attn(h); h = self.b(x); return x + self.mlp(h)": Norms("a", "", "b"),
    "h = self.a(x); x = x + self.attn(h); return x + self.mlp(self.b(x))": Norms("a", "", "b"),
    "h = self.a(x); h = self.attn(h); i = self.b(x); return x + h + self.mlp(i)": Norms(
        "a", "", "b", form="side by side"
    ),
    "h = self.a(x); h = self.attn(h); h = self.b(h); x = x + h; h = self.c(x); h = self.mlp(h); return x + self.d(h)": (
        Norms("a", "b", "c", "d")
    ),
    "x = x + self.attn(self.a(x)); h = self.b(x); return x + self.mlp(h)": Norms("a", "", "b"),
    "h = self.attn(x); x = x + self.a(h); h = self.b(x); return x + self.mlp(h)": Norms("", "a", "b"),
    "h = self.attn(x); x = x + self.a(h); h = self.mlp(x); return x + self.b(h)": Norms("", "a", "", "b"),
    "h = x + self.attn(x); x = self.a(h); h = x + self.mlp(x); return self.b(h)": Norms(
        "", "a", "", "b", form="norms last"
    ),
    "h = x + self.attn(x); return h + self.mlp(self.a(h))": Norms("", "", "a"),
    "x = x + self.attn(x); h = self.a(x); return x + self.mlp(h)": Norms("", "", "a"),
    "h = self.attn(x); i = self.a(x); return x + h + self.mlp(i)": Norms("", "", "a", form="side by side"),
}


def layer_of(code: str, **attributes: Any) -> nn.Module:
    """A layer whose ``forward`` is ``code``."""
    names: dict[str, Any] = {}
    exec(f"def forward(self, x): {code}", names)
    layer: nn.Module = type("Layer", (nn.Module,), {"forward": names["forward"], **attributes})()
    return layer


@pytest.mark.parametrize("code", LAYERS)
def test_the_order_of_the_code_is_found(code: str) -> None:
    order = LAYERS[code]
    found = orders_of_parts(layer_of(code), order.names, "attn.inner", "mlp")
    assert order in found
    assert len(found) == len({*found})
    assert all(each.names == order.names for each in found)


@pytest.mark.parametrize(
    "code",
    [
        "h = self.mlp(self.a(x)); return x + h + self.attn(self.b(h))",
        "h = self.a(x); return x + self.attn(h) + self.mlp(self.norms[1](h))",
        "h = self.a(x); h = self.attn(h); h = self.b(h); h = self.c(h); h = self.d(h); return self.mlp(h)",
    ],
)
def test_of_other_code_none_is_known(code: str) -> None:
    norms = ("a", "b", "c", "d") if "self.d" in code else ("a", "b")
    assert orders_of_parts(layer_of(code), norms, "attn", "mlp") == []


def test_layers_of_an_mlp_in_parts() -> None:
    layer = layer_of("return x")
    layer.intermediate = nn.Identity()
    assert orders_of_parts(layer, ("a", "b"), "attention", "") == [
        Norms("a", "", "b"),
        Norms("", "a", "", "b", form="norms last"),
    ]


IN_A_ROW, SIDE_BY_SIDE = Norms("a", "", "b"), Norms("a", "", "b", form="side by side")
LAST = Norms("", "a", "", "b", form="norms last")


@pytest.mark.parametrize(
    ("attributes", "orders", "left"),
    [
        ({"do_layer_norm_before": True}, (IN_A_ROW, LAST), (IN_A_ROW,)),
        ({"do_layer_norm_before": False}, (IN_A_ROW, LAST), (LAST,)),
        ({"do_layer_norm_before": False}, (IN_A_ROW,), (IN_A_ROW,)),
        ({"use_parallel_residual": True}, (IN_A_ROW, SIDE_BY_SIDE), (SIDE_BY_SIDE,)),
        ({"use_parallel_residual": False}, (IN_A_ROW, SIDE_BY_SIDE), (IN_A_ROW,)),
        ({"use_parallel_residual": True}, (IN_A_ROW, LAST), (IN_A_ROW, LAST)),
        ({}, (IN_A_ROW, SIDE_BY_SIDE), (IN_A_ROW,)),
        ({}, (IN_A_ROW, LAST), (IN_A_ROW, LAST)),
    ],
)
def test_what_a_layer_says_of_its_form_counts(
    attributes: dict[str, bool], orders: tuple[Norms, ...], left: tuple[Norms, ...]
) -> None:
    layer = layer_of("return x", **attributes)
    assert tuple(order for order in orders if not is_of_other_form(layer, orders, order)) == left


@pytest.mark.parametrize(
    ("code", "norms"),
    [
        ("x = x + self.attn(self.a(x)); h = self.b(x); x = x + self.cross(h); h = self.c(x); self.mlp(h)", ("b", "")),
        (
            "h = self.attn(x); h = self.a(h); h = self.b(h); self.cross(h); h = self.c(h); h = self.d(h); self.mlp(h)",
            ("b", "c"),
        ),
        ("h = self.attn(x); h = self.cross(h); h = self.a(h); self.mlp(h)", ("", "")),  # which of the two it belongs to
        ("h = self.cross(x); h = self.a(h); h = self.attn(h); h = self.b(h); self.mlp(h)", ("", "")),
        ("h = self.attn(x); h = self.a(h); self.mlp(h)", ("", "")),
    ],
)
def test_norms_of_attention_to_an_encoder(code: str, norms: tuple[str, str]) -> None:
    assert norms_of_cross(layer_of(code), {*"abcd"}, "attn", "cross", "mlp") == norms
