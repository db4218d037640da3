"""Held-out perplexity of a language model, and the KL divergence of its logits from a reference model's.

Over ``T`` predicted tokens, with ``p`` the reference's distribution and ``q`` the model's:

    perplexity = exp(mean(-log q[token]))        KL = mean(sum_v p[v] * (log p[v] - log q[v]))

Text is cut into windows that don't overlap; the first token of each is only seen, the others are predicted. Softmax is
in float32, sums over tokens in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm


@dataclass(frozen=True)
class Evaluation:
    """Perplexity, KL divergence per token in nats (0 if there was no reference), and how many tokens were predicted."""

    perplexity: float
    kl: float
    tokens: int


def windows_of(tokens: Tensor, length: int) -> Tensor:
    """Tokens ``[n]`` as int64 windows ``[n // length, length]``; what is left over at the end is dropped."""
    count = len(tokens) // length
    if not count:
        raise ValueError(f"{len(tokens)} tokens make no window of {length}: shorten the window")
    return tokens[: count * length].view(count, length).long()


@torch.no_grad()
def window_logits(model: nn.Module, windows: Tensor, batch: int = 8) -> list[Tensor]:
    """The logits ``[batch, length, vocabulary]`` of each batch of windows, in the dtype that the model gives them."""
    return [_logits(model, part) for part in windows.split(batch)]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    windows: Tensor,
    reference: Sequence[Tensor] | None = None,
    *,
    batch: int = 8,
    name: str = "evaluate",
    progress: bool | None = None,
) -> Evaluation:
    """Evaluates a causal language model on ``windows`` ``[n, length]``, ``batch`` of them at a time.

    ``reference``: ``window_logits`` of the reference model with the same windows and ``batch``. Logits that aren't
    finite make both figures NaN.
    """
    parts = windows.split(batch)
    if reference is not None and [logits.shape[:2] for logits in reference] != [part.shape for part in parts]:
        raise ValueError("reference is of other windows or another batch: make it with the same ones")
    nll = kl = 0.0
    for index, part in enumerate(
        tqdm(parts, desc=name, unit="batch", disable=None if progress is None else not progress)
    ):
        log_q = F.log_softmax(_logits(model, part)[:, :-1].float(), dim=-1)
        targets = part[:, 1:, None].to(log_q.device)
        nll -= float(log_q.gather(-1, targets).double().sum())
        if reference is not None:
            log_p = F.log_softmax(reference[index][:, :-1].to(log_q.device).float(), dim=-1)
            kl += float(F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).double().sum())
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    return Evaluation(_exp(nll / tokens), kl / tokens, tokens)


def unigram_perplexity(train: Tensor, held_out: Tensor, vocabulary: int) -> float:
    """The perplexity on ``held_out`` of the frequencies in ``train``, each count one larger: knowing no context."""
    counts = torch.bincount(train.long(), minlength=vocabulary).double() + 1
    return math.exp(-float((counts / counts.sum()).log()[held_out.long()].mean()))


def _logits(model: Any, windows: Tensor) -> Tensor:
    device = next(model.parameters()).device
    logits: Tensor = model(input_ids=windows.to(device), use_cache=False).logits
    return logits


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)
