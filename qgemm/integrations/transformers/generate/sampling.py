"""Chooses the next tokens of a batch on the device: transformers' logits processors, then the argmax or a draw.

Processors that only read the scores are called as they are. Those that read the tokens so far, whose number grows, have
an implementation here that keeps what they need in tensors of constant size. Every other processor is ``NotCovered``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as processors

from qgemm.integrations.transformers.generate.covered import NotCovered
from qgemm.integrations.transformers.generate.stopping import Stops
from qgemm.numerics.formats import FLOAT_DTYPES

# They only read the scores, and never wait for the device.
_OF_SCORES_ALONE = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.LogitNormalization,
)


class Progress:
    """The progress of a batch: what a step reads and writes, in tensors at fixed addresses.

    ``token [B, 1]`` and ``position [..., B, 1]`` are the next step's input, ``step [1]`` counts the tokens,
    ``finished [B]`` tells which rows have ended. Row i of ``rows [steps, B + 1]`` contains the tokens of step i, and
    whether all rows have ended. ``logits [B, V]`` are those of the last forward. Row i of ``largest [steps, B]``
    contains the largest scores of step i, for drawn tokens.
    """

    def __init__(self, batch: int, steps: int, position: Tensor, device: torch.device) -> None:
        """``position`` has the shape of a step's positions."""
        self.token = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.rows = torch.zeros((steps, batch + 1), dtype=torch.int64, device=device)
        self.largest = torch.zeros((steps, batch), device=device, dtype=torch.float32)
        self.logits = torch.empty((batch, 0), device=device, dtype=torch.float32)
        # The counters share one tensor, because a step consists of small kernels, and each one costs time.
        self._counters = torch.zeros(position.numel() + 1, dtype=torch.int64, device=device)
        self.position, self.step = self._counters[:-1].view(position.shape), self._counters[-1:]

    def begin(self, logits: Tensor, position: Tensor) -> None:
        """Called before the first token; ``logits`` and ``position`` are those of the prompt's last token."""
        if self.logits.shape != logits.shape:
            self.logits = torch.empty_like(logits)
        self.logits.copy_(logits)
        self.finished.zero_()
        self.rows[:, -1].zero_()
        self.step.zero_()
        self.position.copy_(position)

    def choose(self, scores: Tensor, ends: Tensor | None, padding: int | None, minimum: int) -> None:
        """Finishes a step, whose tokens are the first of the largest ``scores`` [B, V]: ``dispatch.choose_tokens``."""
        of_largest = (self.token, self.rows, self._counters, self.finished)
        torch.ops.qgemm.choose_tokens(scores, *of_largest, ends, padding, minimum)

    def check_draws(self, steps: int) -> None:
        """Raises ``RuntimeError`` if a token of the first ``steps`` was drawn from an invalid distribution."""
        wrong = (~self.largest[:steps].isfinite()).any(-1).nonzero()
        if len(wrong):
            raise RuntimeError(
                f"the scores of new token {int(wrong[0]) + 1} are NaN or infinite, and nothing can be drawn from them: "
                "look for overflow in the model, or for processors that allow no token"
            )

    def finish(self, ended: Tensor) -> None:
        """Marks the rows ``ended`` [B] as ended with the step that was counted last."""
        self.finished.logical_or_(ended)
        self.rows[:, -1].index_copy_(0, self.step - 1, self.finished.all()[None].to(self.rows.dtype))


class _Stage:
    """What one processor does to scores. Stages with equal ``key`` do the same; most keep nothing about tokens."""

    key: Hashable

    def adopt(self, other: Any) -> None:
        """Starts with the prompts of ``other``, a stage with the same key."""

    def begin(self, prompt: Tensor, vocabulary: int) -> None:
        """Called before the first token, with ``prompt`` [B, S]."""

    def __call__(self, scores: Tensor, progress: Progress) -> Tensor:
        """The processed ``scores`` [B, V]."""
        raise NotImplementedError

    def observe(self, token: Tensor) -> None:
        """Called after ``token`` [B, 1] was chosen."""


class _ScoresAlone(_Stage):
    def __init__(self, processor: processors.LogitsProcessor) -> None:
        self.key = (type(processor), *sorted(vars(processor).items()))
        self._processor = processor

    def __call__(self, scores: Tensor, progress: Progress) -> Tensor:
        processed: Tensor = self._processor(None, scores)
        return processed


class _RepetitionPenalty(_Stage):
    """Scores of tokens that occurred before are multiplied by ``penalty`` if negative, otherwise divided by it.

    The first ``ignored`` tokens of each prompt don't count: a number, or one for each sequence [B].
    """

    def __init__(self, penalty: float, ignored: int | Tensor) -> None:
        self.key = (_RepetitionPenalty, penalty)
        self._penalty = penalty
        self._ignored = ignored
        self._seen: Tensor | None = None

    def adopt(self, other: _RepetitionPenalty) -> None:
        self._ignored = other._ignored

    def begin(self, prompt: Tensor, vocabulary: int) -> None:
        if self._seen is None:  # with an extra position for tokens outside of the vocabulary
            self._seen = torch.empty((prompt.shape[0], vocabulary + 1), dtype=torch.bool, device=prompt.device)
        ignored = torch.as_tensor(self._ignored, device=prompt.device).view(-1, 1)
        counted = torch.arange(prompt.shape[1], device=prompt.device) >= ignored
        self._seen.zero_().scatter_(1, torch.where(counted, prompt, vocabulary).clamp(max=vocabulary), True)

    def __call__(self, scores: Tensor, progress: Progress) -> Tensor:
        assert self._seen is not None, "begin comes first"
        penalized = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(self._seen[:, :-1], penalized, scores)

    def observe(self, token: Tensor) -> None:
        assert self._seen is not None, "begin comes first"
        self._seen.scatter_(1, token, True)


class _NoEndBefore(_Stage):
    """The scores of end tokens are -inf while there are fewer than ``minimum`` new tokens."""

    def __init__(self, minimum: int, ends: Sequence[int]) -> None:
        self.key = (_NoEndBefore, minimum, *ends)
        self.minimum = minimum
        self.ends = ends
        self._is_end: Tensor | None = None

    def begin(self, prompt: Tensor, vocabulary: int) -> None:
        if self._is_end is None:
            ends = torch.tensor(self.ends, device=prompt.device)
            self._is_end = (torch.arange(vocabulary, device=prompt.device)[:, None] == ends).any(-1)

    def __call__(self, scores: Tensor, progress: Progress) -> Tensor:
        assert self._is_end is not None, "begin comes first"
        return scores.masked_fill(self._is_end & (progress.step < self.minimum), -math.inf)


def _stage(processor: processors.LogitsProcessor, prompt_length: int) -> _Stage:
    if type(processor) in _OF_SCORES_ALONE:
        return _ScoresAlone(processor)
    if type(processor) is processors.RepetitionPenaltyLogitsProcessor:
        ignored: int | Tensor | None = processor.prompt_ignore_length
        ignored = 0 if ignored is None else ignored
        if int(ignored.max() if isinstance(ignored, Tensor) else ignored) <= prompt_length:
            return _RepetitionPenalty(processor.penalty, ignored)
    if type(processor) is processors.MinNewTokensLengthLogitsProcessor:
        minimum = processor.min_new_tokens + processor.prompt_length_to_skip - prompt_length
        return _NoEndBefore(minimum, processor.eos_token_id.tolist())
    if type(processor) is processors.MinLengthLogitsProcessor:
        return _NoEndBefore(processor.min_length - prompt_length, processor.eos_token_id.tolist())
    raise NotCovered(f"it knows no logits processor {type(processor).__name__}")


def _in_parts(scores: Tensor) -> Tensor:
    """``scores [B, V]`` as ``[B, parts, V / parts]``.

    PyTorch reduces a row on a single multiprocessor: 29 us for the argmax of 128,256 values, 54 us for their softmax
    (H200).
    """
    parts = next(parts for parts in (256, 128, 64, 32, 16, 1) if scores.shape[-1] % parts == 0)
    return scores.view(scores.shape[0], parts, -1)


class Sampler:
    """Chooses the tokens of a step and writes them to ``Progress``. Samplers with equal ``key`` do the same.

    A draw is that of ``torch.multinomial``: the argmax of the probabilities, each divided by exponential noise.
    """

    def __init__(
        self,
        given: Sequence[processors.LogitsProcessor],
        stops: Stops,
        prompt_length: int,
        do_sample: bool,
        padding: int | None,
    ) -> None:
        """Raises ``NotCovered`` for an unknown processor. ``padding``: the token for rows that have ended."""
        self._stages = [_stage(processor, prompt_length) for processor in given]
        self._stops = stops
        self.draws = do_sample
        self._padding = padding if stops.pads else None
        self.key: Hashable = (*(stage.key for stage in self._stages), stops.key, do_sample, self._padding)

    def adopt(self, other: Sampler) -> None:
        """Starts with the prompts of ``other``, a sampler with the same key."""
        for stage, its in zip(self._stages, other._stages, strict=True):
            stage.adopt(its)

    def begin(self, prompt: Tensor, vocabulary: int) -> None:
        """Called before the first token, with ``prompt`` [B, S]."""
        for stage in self._stages:
            stage.begin(prompt, vocabulary)
        self._stops.begin(prompt)

    def scores(self, logits: Tensor, progress: Progress) -> Tensor:
        """The processed scores of ``logits`` [B, V], in float32 if they are processed or drawn from."""
        if not self._stages and not self.draws:
            return logits
        scores = logits.float()
        for stage in self._stages:
            scores = stage(scores, progress)
        return scores

    def _minimum(self) -> int:
        """The step before which no end token may be chosen, if that is the only processing of scores; else 0."""
        if self.draws or len(self._stages) != 1:
            return 0
        (stage,) = self._stages
        return stage.minimum if isinstance(stage, _NoEndBefore) and stage.ends == self._stops.ends else 0

    def __call__(self, progress: Progress) -> None:
        """Chooses tokens by ``progress.logits``."""
        minimum = self._minimum()
        scores = progress.logits if minimum else self.scores(progress.logits, progress)
        if self.draws:
            # torch.multinomial would wait for the device to check its argument. softmax's divisor makes no difference.
            most = _in_parts(scores).amax(-1).amax(-1, keepdim=True)
            progress.largest.index_copy_(0, progress.step, most.T)
            scores = (scores - most).exp_() / torch.empty_like(scores).exponential_()
        elif scores.dtype not in FLOAT_DTYPES:
            scores = scores.float()
        progress.choose(scores, self._stops.end_tokens, self._padding, minimum)
        for stage in self._stages:
            stage.observe(progress.token)
        ended = self._stops.by_strings(progress.token)
        if ended is not None:
            progress.finish(ended)
