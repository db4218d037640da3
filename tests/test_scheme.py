"""``QuantScheme`` as a value: names made from it, what it asks for, and how one is made of another."""

import re
import sys

import pytest
from families.schemes import EVERY_SCHEME

from qgemm import SCHEMES, QuantScheme
from qgemm.numerics.formats import FORMATS, INT8
from qgemm.scheme import TensorScheme, resolve_scheme

INT8_DYNAMIC, STATIC = SCHEMES["int8"], SCHEMES["int8-static"]


@pytest.mark.parametrize("name", EVERY_SCHEME)
def test_what_a_scheme_asks_for_is_in_its_name(name: str) -> None:
    scheme = resolve_scheme(name)
    assert scheme.name == name
    assert scheme.is_static == ("static" in name)
    assert scheme.has_zero_point == ("asymmetric" in name)
    assert scheme.rotates == ("hadamard" in name)
    assert scheme.outlier_columns == (int(name.rpartition("-")[2]) if "outliers" in name else 0)
    assert scheme.is_weight_only == name.startswith("int4")
    assert scheme.is_plain == (not scheme.is_weight_only and not re.search("asymmetric|hadamard|outliers", name))
    assert scheme.needs_data == ("static" in name or "outliers" in name)
    assert scheme.needs_blocks == ("outliers" in name or name == "int8-static-hadamard")
    assert scheme.max_k == (sys.maxsize if scheme.activation is None else FORMATS[scheme.activation.dtype].max_k)
    assert scheme.for_experts() == INT8_DYNAMIC


def test_one_is_made_of_another() -> None:
    assert INT8_DYNAMIC.rotated() is SCHEMES["int8-hadamard"]
    assert STATIC.rotated() is SCHEMES["int8-static-hadamard"]
    assert STATIC.with_outliers(32) == resolve_scheme("int8-static-outliers-32")
    assert STATIC.with_outliers(32).without_outliers() == STATIC
    assert SCHEMES["int4"].without_outliers() == SCHEMES["int4"]


@pytest.mark.parametrize("name", ["int4", "int8-hadamard", "int8-static-asymmetric", "int8-outliers-16"])
def test_what_has_no_such_form(name: str) -> None:
    scheme = resolve_scheme(name)
    with pytest.raises(ValueError, match=f"scheme '{name}' can't be combined with a rotation"):
        scheme.rotated()
    with pytest.raises(ValueError, match=f"scheme '{name}' can't be combined with 16 columns in float"):
        scheme.with_outliers(16)


@pytest.mark.parametrize("count", [-16, 0, 8, 17])
def test_columns_come_by_the_sixteen(count: int) -> None:
    with pytest.raises(ValueError, match=f"can't be combined with {count} columns"):
        INT8_DYNAMIC.with_outliers(count)


@pytest.mark.parametrize(
    "name",
    ["int8-outliers", "int8-outliers-0", "int8-outliers-08", "int8-outliers-17", "int4-outliers-16", "-outliers-16"]
    + ["int8-hadamard-outliers-16", "int8-outliers-16-outliers-16", "int8-hadamard-hadamard", "INT8", ""],
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="it must be one of"):
        resolve_scheme(name)


def test_a_name_with_another_scheme_s_values_is_none() -> None:
    for wrong in (
        QuantScheme("int8", STATIC.weight, STATIC.activation),
        QuantScheme("mine", STATIC.weight, STATIC.activation),
        QuantScheme("int8", TensorScheme("int8", "tensor"), INT8_DYNAMIC.activation),
    ):
        with pytest.raises(ValueError, match="it must be one of"):
            resolve_scheme(wrong)


def test_formats() -> None:
    for name, form in FORMATS.items():
        assert TensorScheme(name, "channel").format is form
    assert TensorScheme("int8", "tensor", symmetric=False).format is INT8.asymmetric
