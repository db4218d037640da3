"""The choice of tokens in plain PyTorch: the kernels are tested against it, and it runs on a CPU."""

import torch

from qgemm.kernels.sampling.choice import Choice


def choose_tokens_reference(choice: Choice) -> None:
    """``dispatch.choose_tokens``."""
    scores, token, rows, counters, finished, ends, padding, minimum = choice
    step = int(counters[-1])
    noted = rows[step : step + 1] if step >= 0 else rows[:0]
    if ends is not None and step < minimum:
        is_end = (torch.arange(scores.shape[1], device=scores.device)[:, None] == ends).any(-1)
        scores = scores.masked_fill(is_end, -torch.inf)
    token.copy_(scores.argmax(-1, keepdim=True))
    if padding is not None:
        token.masked_fill_(finished[:, None], padding)
    noted[:, :-1] = token[:, 0]
    if ends is not None:
        finished.logical_or_((token == ends).any(-1))
        noted[:, -1] = finished.all()
    counters.add_(1)
