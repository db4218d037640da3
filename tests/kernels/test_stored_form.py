"""What follows from how a weight is stored."""

import pytest
import torch

from qgemm.kernels.stored_form import WHOLE_ROW, StoredForm


def test_zero_points_are_whole_numbers_or_floats() -> None:
    zeros = torch.zeros(4, 1)
    assert StoredForm.of("int4", 0, None) == StoredForm("int4", 0)
    assert StoredForm.of("int4", 0, zeros.char()) == StoredForm("int4", 0, has_zeros=True)
    # They aren't left to the sums, as one scale of a row is.
    assert StoredForm.of("int4", 0, zeros) == StoredForm("int4", WHOLE_ROW, has_zeros=True, float_zeros=True)
    assert StoredForm.of("int4", 32, zeros.half()).group == 32


@pytest.mark.parametrize(("group", "whole", "by_groups"), [(32, True, True), (32, False, False), (128, True, False)])
def test_few_rows_are_multiplied_group_by_group_where_rows_are_whole_blocks(
    group: int, whole: bool, by_groups: bool
) -> None:
    assert StoredForm("int4", group, whole=whole).by_groups == by_groups


@pytest.mark.parametrize(("group", "small"), [(0, False), (16, True), (32, True), (128, False), (WHOLE_ROW, False)])
def test_scales_of_small_groups_and_with_float_zeros_multiply_values(group: int, small: bool) -> None:
    assert StoredForm("int4", group).has_small_groups == StoredForm("int4", group).scales_values == small
    assert StoredForm("int4", group, has_zeros=True, float_zeros=True).scales_values


def test_float_zeros_and_float16_need_float32() -> None:
    plain, zeros = StoredForm("int4", 32), StoredForm("int4", 32, has_zeros=True, float_zeros=True)
    assert [form.precision(True, bfloat16) for form in (plain, zeros) for bfloat16 in (True, False)] == ["exact"] * 4
    assert (plain.precision(False, True), plain.precision(False, False)) == ("two", "float")
    assert (zeros.precision(False, True), zeros.precision(False, False)) == ("float", "float")
