"""The choice of tokens in plain PyTorch: what the kernels are tested against, and what runs on a CPU."""

import torch

from qgemm.kernels.sampling.choice import Choice


def choose_tokens_reference(choice: Choice) -> None:
    """``dispatch.choose_tokens``."""
    scores, token, rows, counters, finished, ends, padding, minimum = choice
    step = counters[-1].clone()
    if ends is not None and minimum > 0:
        is_end = (torch.arange(scores.shape[1], device=scores.device)[:, None] == ends).any(-1)
        scores = scores.masked_fill(is_end & (step < minimum), -torch.inf)
    token.copy_(scores.argmax(-1, keepdim=True))
    if padding is not None:
        token.masked_fill_(finished[:, None], padding)
    rows[step, :-1] = token[:, 0]
    if ends is not None:
        finished.logical_or_((token == ends).any(-1))
        rows[step, -1] = finished.all()
    counters.add_(1)
