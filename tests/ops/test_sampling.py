"""``torch.ops.qgemm.choose_tokens``: registered properly."""

import pytest
import torch

import qgemm.ops  # noqa: F401 - which declares it


@pytest.mark.parametrize("ends", [False, True])
def test_it_is_registered_properly(ends: bool, device: torch.device) -> None:
    scores = torch.randn((3, 40), device=device)
    token, counters = (
        torch.zeros((3, 1), dtype=torch.int64, device=device),
        torch.zeros(4, dtype=torch.int64, device=device),
    )
    rows, finished = (
        torch.zeros((5, 4), dtype=torch.int64, device=device),
        torch.zeros(3, dtype=torch.bool, device=device),
    )
    others = (torch.tensor([1, 2], device=device), 0, 2) if ends else (None, None, 0)
    torch.library.opcheck(torch.ops.qgemm.choose_tokens.default, (scores, token, rows, counters, finished, *others))
