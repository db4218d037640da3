"""``QuantScheme`` as a value: names made from it, what it asks for, and how one is made of another."""

import json
import re
import sys

import pytest
from families.schemes import EVERY_LAYER

from qgemm import SCHEMES, QuantScheme
from qgemm.nn import linear_class
from qgemm.numerics.formats import FORMATS, INT8
from qgemm.scheme import TensorScheme, resolve_scheme

INT8_DYNAMIC, STATIC = SCHEMES["int8"], SCHEMES["int8-static"]


def experts_name(name: str) -> str:
    """Products in int8 and fp8 by scales at run time; weights alone as they are, in the input's order."""
    if re.match("int8(?!-weight)", name):
        return "int8"
    if name in ("fp8", "fp8-static"):
        return "fp8"
    return name.removesuffix("-int8").removesuffix("-ordered").removesuffix("-prescaled")


def test_float_zero_points_are_for_activations_in_float() -> None:
    with pytest.raises(ValueError, match=r"float zero points are for activations in float: leave '-int8' out, or take"):
        resolve_scheme("int4-32-float-zeros-int8")


def test_experts_with_a_scheme_of_each_weight() -> None:
    scheme = resolve_scheme("int4-32-float-zeros+int8-weight-16")
    assert scheme == resolve_scheme("int4-32-float-zeros").with_down(resolve_scheme("int8-weight-16"))
    assert QuantScheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme == scheme.for_experts()
    assert [part.name for part in scheme.parts] == scheme.name.split("+")
    assert scheme.of("down_proj_scale") == scheme.parts[1]
    assert scheme.of("gate_up_proj") == scheme.parts[0]
    assert SCHEMES["int8"].with_down(SCHEMES["int8"]).parts == (SCHEMES["int8"], SCHEMES["int8"])
    with pytest.raises(ValueError, match="experts can't have 'int8' and 'int4', as activations of one are quantized"):
        SCHEMES["int8"].with_down(SCHEMES["int4"])
    wanted = (
        r"computes the scheme 'int4-32-float-zeros\+int8-weight-16': it is for experts alone.*'int4-32-float-zeros'$"
    )
    with pytest.raises(ValueError, match=wanted):
        linear_class(scheme)


@pytest.mark.parametrize("name", ["int4+int4", "int4+int8", "int4-ordered+mxfp4", "int4+int8-weight+nf4", "int4+", "+"])
def test_what_is_no_scheme_of_two_weights(name: str) -> None:
    with pytest.raises(ValueError, match=f"scheme is {re.escape(repr(name))}"):
        resolve_scheme(name)


def test_experts_of_int8_activations_by_int4_compute_in_float() -> None:
    assert resolve_scheme("int4-32-int8").for_experts() == resolve_scheme("int4-32")


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_what_a_scheme_asks_for_is_in_its_name(name: str) -> None:
    scheme = resolve_scheme(name)
    assert scheme.name == name
    assert scheme.is_static == ("static" in name)
    assert (scheme.has_zero_point or not scheme.weight.symmetric) == bool(re.search("asymmetric|float-zeros", name))
    assert scheme.weight.float_zeros == ("float-zeros" in name)
    assert scheme.has_zero_point == (name == "int8-static-asymmetric")
    assert scheme.rotates == ("hadamard" in name)
    assert scheme.outlier_columns == (int(name.rpartition("-")[2]) if "outliers" in name else 0)
    of_weights = re.match("int4|int8-weight|fp8-weight|mxfp|nvfp4|nf4|bnb-fp4", name)
    assert scheme.is_weight_only == (of_weights is not None and not re.match("int4.*-int8", name))
    assert scheme.weight.is_ordered == ("ordered" in name)
    assert scheme.weight.is_prescaled == ("prescaled" in name)
    assert scheme.is_plain == (not scheme.is_weight_only and not re.search("static-asymmetric|hadamard|outliers", name))
    assert scheme.needs_data == ("static" in name or "outliers" in name)
    assert scheme.needs_blocks == ("outliers" in name or name == "int8-static-hadamard")
    assert scheme.max_k == (sys.maxsize if scheme.activation is None else FORMATS[scheme.activation.dtype].max_k)
    assert scheme.for_experts().name == experts_name(name)
    assert scheme.for_experts().for_experts() == scheme.for_experts()


@pytest.mark.parametrize(
    "name",
    ["int4-16", "int4-64-asymmetric", "int4-channel-ordered", "int4-int8", "int4-channel-asymmetric-int8", "int4-1024"]
    + ["int8-weight-float-zeros", "int4-channel-float-zeros-ordered", "int8-weight-asymmetric"]
    + ["int8-weight-32-ordered", "nf4-32", "bnb-fp4-32", "fp8", "fp8-static", "fp8-block"],
)
def test_families(name: str) -> None:
    scheme = resolve_scheme(name)
    assert scheme.name == name
    assert resolve_scheme(scheme) == scheme
    assert QuantScheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


def test_what_the_values_are() -> None:
    int4, nvfp4 = SCHEMES["int4"].weight, SCHEMES["nvfp4"].weight
    assert (int4.dtype, int4.group_size, int4.scale_dtype, int4.symmetric) == ("int4", 128, "bfloat16", True)
    assert (nvfp4.dtype, nvfp4.group_size, nvfp4.scale_dtype) == ("fp4", 16, "e4m3")
    assert (SCHEMES["mxfp4"].weight.group_size, SCHEMES["mxfp4"].weight.scale_dtype) == (32, "e8m0")
    assert resolve_scheme("fp8-block").weight.block == (128, 128)
    assert resolve_scheme("int4-32-int8").activation == INT8_DYNAMIC.activation
    assert "scale_dtype" not in INT8_DYNAMIC.to_dict()["weight"]


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
    + ["int8-hadamard-outliers-16", "int8-outliers-16-outliers-16", "int8-hadamard-hadamard", "INT8", ""]
    + [
        "int4-128",
        "int4-0",
        "int4-24",
        "int4-032",
        "int4-ordered-asymmetric",
        "int8-weight-int8",
        "int8-weight-channel",
    ]
    + ["nf4-64", "nf4-channel", "nf4-asymmetric", "bnb-fp4-64", "bnb-fp4-channel", "bnb-fp4-ordered", "bnb-nf4", "fp4"]
    + ["int4-asymmetric-float-zeros", "int4-ordered-float-zeros", "nf4-float-zeros", "fp8-weight-float-zeros"]
    + ["nf4-int8", "bnb-fp4-int8", "mxfp4-16", "fp8-weight-asymmetric", "int4-hadamard"],
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="it must be one of"):
        resolve_scheme(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("INT8", "int8"),
        ("int8_static", "int8-static"),
        ("int-8", "int8"),
        ("mxpf4", "mxfp4"),
        ("W4A16", "int4"),
        ("w4a8", "int4-int8"),
        ("w8a8", "int8"),
        ("w8a16", "int8-weight"),
        ("int4-8", "int4-int8"),
    ],
)
def test_a_name_that_is_near(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"scheme is '{name}' \(did you mean '{meant}'\?\); it must be one of"):
        resolve_scheme(name)
    assert resolve_scheme(meant).name == meant


@pytest.mark.parametrize(
    ("name", "meant", "size"),
    [("int4-128", "int4", 128), ("INT4_128_int8", "int4-int8", 128), ("int4-128-asymmetric", "int4-asymmetric", 128)]
    + [("nf4-64", "nf4", 64), ("BNB_FP4_64", "bnb-fp4", 64)],
)
def test_a_size_that_needs_no_name(name: str, meant: str, size: int) -> None:
    expected = rf"scheme is '{name}' \(did you mean '{meant}', whose groups have {size} values\?\); it must be one of"
    with pytest.raises(ValueError, match=expected):
        resolve_scheme(name)
    assert resolve_scheme(meant).weight.group_size == size


def test_nothing_is_guessed_of_a_name_that_is_near_none() -> None:
    with pytest.raises(ValueError, match=r"any multiple of 16$"):
        resolve_scheme("int3")


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


def test_scales_in_steps() -> None:
    scheme = resolve_scheme("int4-int8")
    assert scheme.weight.scale_dtype == "steps"
    for name in ("int4", "int4-channel-int8", "int4-asymmetric-int8"):
        assert resolve_scheme(name).weight.scale_dtype == "bfloat16"
    # Files of before have these.
    values = scheme.to_dict()
    values["weight"]["scale_dtype"] = "bfloat16"
    assert QuantScheme.from_dict(values) == scheme


def test_what_is_stored_alike() -> None:
    weights = {name: resolve_scheme(name).weight for name in ("int4", "int4-int8", "int4-32", "mxfp4", "nf4-32")}
    assert weights["int4"].is_stored_as(weights["int4-int8"])
    assert weights["int4-int8"].is_stored_as(weights["int4"])
    assert not weights["int4"].is_stored_as(weights["int4-32"])
    assert not weights["mxfp4"].is_stored_as(weights["nf4-32"])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gptq", r"pass scheme='int4' with recipe=\[GPTQ\(\)\]"),
        ("AWQ", r"pass scheme='int4' with recipe=\[AWQ\(\)\]"),
        ("smoothquant", r"pass scheme='int8-static' with recipe=\[SmoothQuant\(\)\]"),
        ("fp4", "'mxfp4' and 'nvfp4', and 'bnb-fp4' with bitsandbytes' own fp4"),
        ("bnb-nf4", "bitsandbytes' nf4 is 'nf4'"),
        ("int3", "the fewest bits are those of 'int4'"),
    ],
)
def test_names_of_what_is_no_scheme(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"scheme is '{name}' \(.*{hint}\); it must be one of"):
        resolve_scheme(name)
