"""The choice of tokens: the kernels against plain PyTorch, in Triton's interpreter here, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qgemm.kernels.sampling import dispatch, launcher
from qgemm.kernels.sampling.choice import Choice
from qgemm.kernels.sampling.reference import choose_tokens_reference

NAN, INF = float("nan"), float("inf")
FUNCTIONS = pytest.mark.parametrize(
    "function", [launcher.choose_tokens, dispatch.choose_tokens], ids=["kernels", "user"]
)


class Written(NamedTuple):
    """What a call writes: ``token``, ``rows``, ``counters``, ``finished``."""

    token: Tensor
    rows: Tensor
    counters: Tensor
    finished: Tensor


def state(B: int, device: torch.device, step: int = 1, steps: int = 3, counters: int = 4) -> Written:
    """With other rows' tokens in ``rows``, and every third row finished."""
    counts = torch.arange(counters, device=device)
    counts[-1] = step
    finished = torch.arange(B, device=device) % 3 == 2
    return Written(
        torch.full((B, 1), -1, device=device), torch.full((steps, B + 1), -2, device=device), counts, finished
    )


def assert_as_reference(function: Callable[..., None], scores: Tensor, step: int = 1, *options: Any) -> Written:
    found, expected = (state(scores.shape[0], scores.device, step) for _ in range(2))
    function(Choice(scores, *found, *options))
    choose_tokens_reference(Choice(scores, *expected, *options))
    for name, one, other in zip(Written._fields, found, expected, strict=True):
        assert torch.equal(one, other), name
    return found


@FUNCTIONS
@pytest.mark.parametrize(
    ("B", "V", "dtype"),
    [
        (1, 1, torch.float32),
        (1, 1025, torch.bfloat16),  # a part more, of one value
        (3, 97, torch.float16),
        (9, 2048, torch.bfloat16),  # a part a row, and more rows than few
        (2, 5000, torch.float32),
        (0, 8, torch.float32),
    ],
)
def test_it_is_the_first_of_the_largest(
    function: Callable[..., None], B: int, V: int, dtype: torch.dtype, device: torch.device
) -> None:
    scores = torch.randint(-40, 40, (B, V), device=device).to(dtype)  # with equals
    found = assert_as_reference(function, scores)
    assert found.counters.tolist() == [1, 2, 3, 2]
    assert (found.rows[[0, 2]] == -2).all(), "another step's"
    assert (found.rows[1, B:] == -2).all(), "nothing ends"


@FUNCTIONS
def test_rows_of_parts(function: Callable[..., None], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the program that chooses reads at a time, and the largest in each of the parts."""
    monkeypatch.setattr(launcher, "MAX_PART", 16)
    monkeypatch.setattr(launcher, "MAX_KEYS", 64)
    scores = torch.zeros((21, 100), device=device)
    scores[torch.arange(21), 5 * torch.arange(21) % 100] = 1.0
    assert_as_reference(function, scores, 1, torch.tensor([5, 90], device=device), 3)


@FUNCTIONS
def test_what_is_no_number(function: Callable[..., None], device: torch.device) -> None:
    rows = [[1, NAN, INF, NAN], [-INF, -INF, -INF, -INF], [0.0, -0.0, -1, -1], [-0.0, 0.0, -1, -1], [-2, -INF, -1, -3]]
    found = assert_as_reference(function, torch.tensor(rows, device=device))
    assert found.token[:, 0].tolist() == [1, 0, 0, 0, 2]


@FUNCTIONS
@pytest.mark.parametrize("padding", [None, 0, 7])
def test_ends(function: Callable[..., None], padding: int | None, device: torch.device) -> None:
    ends = torch.tensor([3, 6], device=device)
    scores = torch.nn.functional.one_hot(torch.tensor([3, 4, 5, 6], device=device), 8).float()
    found = assert_as_reference(function, scores, 1, ends, padding)
    assert found.finished.tolist() == [True, False, True, True]
    assert found.rows[1].tolist() == [3, 4, 5 if padding is None else padding, 6, 0]
    found = assert_as_reference(function, scores[[0, 3, 1]], 2, ends, padding)
    assert found.rows[2, -1] == 1, "the third had ended before"


@FUNCTIONS
def test_no_end_before_a_minimum(function: Callable[..., None], device: torch.device) -> None:
    ends = torch.tensor([0, 5], device=device)
    scores = torch.tensor([[5.0, 1, 2, 3, 4, 5], [-INF, -INF, -INF, -INF, -INF, 1]], device=device)
    for step, tokens in ((0, [4, 0]), (1, [4, 0]), (2, [0, 5])):
        assert assert_as_reference(function, scores, step, ends, None, 2).token[:, 0].tolist() == tokens
    assert assert_as_reference(function, scores, 0, None, None, 2).token[:, 0].tolist() == [0, 5]


@FUNCTIONS
@pytest.mark.parametrize(("step", "first"), [(-1, 0), (3, 1), (1 << 40, 1)])  # 0 is the minimum: no row ends before
def test_a_step_that_has_no_row(function: Callable[..., None], step: int, first: int, device: torch.device) -> None:
    ends = torch.tensor([1], device=device)
    found = assert_as_reference(function, torch.eye(4, device=device)[1:], step, ends)
    assert found.token[:, 0].tolist() == [first, 2, 3]
    assert found.finished.tolist() == [first == 1, False, True]
    assert found.counters[-1] == step + 1
    assert (found.rows == -2).all()


@FUNCTIONS
def test_without_rows_all_have_ended(function: Callable[..., None], device: torch.device) -> None:
    found = assert_as_reference(function, torch.zeros((0, 8), device=device), 1, torch.tensor([3], device=device))
    assert found.rows[:, 0].tolist() == [-2, 1, -2]


def test_rows_of_scores_may_be_apart(device: torch.device) -> None:
    scores = torch.randn((4, 300), device=device)
    assert_as_reference(launcher.choose_tokens, scores[:, 7:200])
    assert_as_reference(launcher.choose_tokens, scores.T)


def test_it_says_what_it_takes(device: torch.device) -> None:
    scores, written = torch.randn((2, 8), device=device), state(2, device)
    with pytest.raises(TypeError, match=r"scores is torch\.float64"):
        dispatch.choose_tokens(Choice(scores.double(), *written))
    with pytest.raises(ValueError, match=r"scores has shape \[2, 8, 1\]"):
        dispatch.choose_tokens(Choice(scores[..., None], *written))
    with pytest.raises(ValueError, match=r"rows is torch.int64 \[3, 2\]; it must be contiguous torch.int64 \[3, 3\]"):
        dispatch.choose_tokens(Choice(scores, *written._replace(rows=written.rows[:, :2].clone())))
    with pytest.raises(ValueError, match=r"rows is torch.int64 \[\]; it must be contiguous torch.int64 \[0, 3\]"):
        dispatch.choose_tokens(Choice(scores, *written._replace(rows=written.rows[0, 0])))
    with pytest.raises(ValueError, match=r"rows is torch.int64 \[3, 3\]; it must be contiguous"):
        dispatch.choose_tokens(Choice(scores, *written._replace(rows=written.rows.mT)))
    with pytest.raises(ValueError, match=r"finished is torch\.int64"):
        dispatch.choose_tokens(Choice(scores, *written._replace(finished=written.finished.long())))
    with pytest.raises(ValueError, match=r"ends is torch\.int32"):
        dispatch.choose_tokens(Choice(scores, *written, torch.tensor([1], dtype=torch.int32, device=device)))
