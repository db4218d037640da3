"""Prefill, then one step after another: a forward, the choice of a token, and tokens that are read some steps later.

The host queues up to ``AHEAD`` more steps than it has read. Steps queued after the end of all sequences are undone:
their tokens are cut off, and the cache and the random generator are as if these steps had never run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from qgemm.integrations.transformers.cache import ARGUMENT, values_of
from qgemm.integrations.transformers.generate.contexts import Context
from qgemm.integrations.transformers.generate.decoder import Decoder
from qgemm.integrations.transformers.generate.request import Request
from qgemm.replay.graphs import CaptureError, Replayed

# On a GPU, the steps queued beyond the last one that was read. A host that is delayed for that many steps costs
# nothing; sequences that end early cost as many steps.
AHEAD = 4
MAX_PROMPT_VALUES = 2**24
"""Prompts of a batch are computed in parts whose hidden states have at most this many values, 4,096 tokens at Llama 3
8B's sizes: then a forward's memory besides weights and cache doesn't grow with the batch."""


class Loop:
    """The steps of one request. ``ahead``: how many steps may be queued beyond the last one that was read."""

    def __init__(
        self,
        model: PreTrainedModel,
        request: Request,
        context: Context,
        decoder: Decoder,
        ahead: int,
        tell: Callable[[str], None],
        free: Callable[[], bool],
    ) -> None:
        """``tell`` is called with a sentence if steps can't be captured; they then run without graphs.

        ``free`` is called if there isn't enough memory, and returns whether it freed any.
        """
        self._model: Any = model
        self._request = request
        self._context = context
        self._decoder = decoder
        self._ahead = ahead
        self._tell = tell
        self._free = free

    def run(self, streamer: BaseStreamer | None) -> Tensor:
        """Returns the prompts with their new tokens, [B, S + steps]."""
        with self._decoder.in_order():
            used = self._context.used
            try:
                self._prefill()
                filled = True
            except torch.OutOfMemoryError:
                filled = False
                if not self._free():
                    raise
            if not filled:  # not in the except block, where the error still holds what was allocated
                self._context.rewind(used)
                self._prefill()
            if streamer is not None:
                streamer.put(self._request.input_ids.cpu())
            self._forward_step = self._decoder.forward(self._context.prefilled())
            # As in transformers: float experts have another implementation for few tokens.
            with self._model._optimize_model_for_decode():
                taken = self._steps(streamer)
            return torch.cat([self._request.input_ids, self._decoder.progress.rows[:taken, :-1].T], dim=1)

    def _steps(self, streamer: BaseStreamer | None) -> int:
        """Runs the steps; returns how many tokens each sequence got."""
        request, reader, progress = self._request, self._decoder.reader, self._decoder.progress
        prefilled = self._context.used
        sampler, sampling = self._decoder.sampler(request.sampler)
        sampler.begin(request.input_ids, progress.logits.shape[-1])
        reader.begin()
        offsets = []

        queued = taken = 0
        ended = False
        while not ended:
            if queued < request.steps:
                if queued:
                    self._forward()
                self._replay(sampling, lambda: sampler(progress))
                offsets.append(_generator_offset(progress.logits.device))
                reader.send(queued)
                queued += 1
            while not ended and reader.pending > (self._ahead if queued < request.steps else 0):
                tokens, ended = reader.take()
                taken += 1
                ended = ended or taken == request.steps or request.stops.out_of_time()
                if streamer is not None:
                    streamer.put(tokens.clone())
        if queued > taken:
            self._context.rewind(prefilled + taken - 1)
            _rewind_generator(progress.logits.device, offsets[taken - 1])
        if sampler.draws:
            progress.check_draws(taken)
        if streamer is not None:
            streamer.end()
        return taken

    def _prefill(self) -> None:
        request, context, mask = self._request, self._context, self._request.attention_mask
        context.begin(mask)
        logits = []
        with contextlib.closing(context.parts(self._rows_together())) as parts:
            for rows in parts:
                context.advance(request.new)
                own = None if mask is None else mask[rows]
                # Copied, so that the logits of all other tokens are freed.
                logits.append(self._logits(request.prompt[rows], request.position_ids[..., rows, :], own).clone())
        self._decoder.progress.begin(torch.cat(logits), request.position_ids[..., -1:])

    def _rows_together(self) -> int:
        """The number of prompts that are computed together."""
        config = self._model.config.get_text_config(decoder=True)
        rope = values_of(config, "rope_parameters")  # nested if kinds of layers differ
        looks_at_lengths = any(kind in str(rope) for kind in ("dynamic", "longrope"))  # at those of all prompts
        parts = (module for module in self._model.modules() if module is not self._model)
        hooked = any(part._forward_pre_hooks or part._forward_hooks for part in parts)  # PEFT's must see all sequences
        compiled = self._model._compiled_call_impl is not None
        if looks_at_lengths or hooked or compiled or "forward" in vars(self._model):
            return self._request.batch
        together: int = MAX_PROMPT_VALUES // (config.hidden_size * self._request.new)
        return max(1, together)

    def _forward(self) -> None:
        progress, context = self._decoder.progress, self._context
        used = context.used

        def run() -> None:
            context.advance(1)
            progress.logits.copy_(self._logits(progress.token, progress.position, context.step_mask))

        self._replay(self._forward_step, run)
        context.used = used + 1  # a replay only counts on the device

    def _replay(self, step: Replayed, run: Callable[[], None]) -> None:
        used = self._context.used
        try:
            step(run)
        except CaptureError as error:
            self._tell(f"generate's steps run without CUDA graphs, which is slower: {error}")
            self._context.used = used
            run()

    def _logits(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """The logits [B, V] of the last of ``tokens`` [B, S]."""
        outputs = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            **{ARGUMENT: self._context.cache},
            use_cache=True,
            return_dict=True,
            **({"logits_to_keep": 1} if self._request.keeps_last else {}),
        )
        logits: Tensor = outputs.logits[:, -1]
        return logits


def _generator_offset(device: torch.device) -> int:
    """The position in a GPU's random numbers. A CPU queues no steps, so there is nothing to undo."""
    return torch.cuda.default_generators[device.index].get_offset() if device.type == "cuda" else 0


def _rewind_generator(device: torch.device, offset: int) -> None:
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].set_offset(offset)
