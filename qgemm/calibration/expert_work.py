"""``decide_experts``: applies a method to fused experts, each expert according to the tokens that it saw.

An expert is ``down(activation(gate_up(x)))``. The inputs of both products are recomputed here, in float, from the rows
that the router sent to the expert during calibration, because no hook sees them. Experts are processed one at a time,
so that, besides the module's inputs, memory is needed for one layer only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qgemm.calibration.hooks import hooked
from qgemm.calibration.method import Block, ExpertsWork, QuantizedWeight
from qgemm.calibration.padding import Batch
from qgemm.model.selection import listed
from qgemm.nn.float_experts import FloatExperts, describe_experts
from qgemm.nn.kinds import meta_linear
from qgemm.nn.linear_layer import largest
from qgemm.nn.quant_layer import narrowed
from qgemm.scheme import QuantScheme, TensorScheme

MIN_TOKENS = 32
"""An expert that saw fewer tokens is rounded to nearest: so few rows say little about the others that it will get."""

Decide = Callable[[Tensor, Tensor | None, TensorScheme], QuantizedWeight | None]
"""Quantizes a float weight ``[N, K]`` for inputs with a second moment ``[K, K]``; None means rounding to nearest."""


def routed_rows(
    source: FloatExperts, name: str, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The rows ``[n, hidden_size]`` that the experts ``name`` get, and the experts of each row, ``[n, top_k]``.

    ``args``, ``kwargs``: the arguments of the module's call. Padding is left out.
    """
    given = dict(zip(("hidden_states", "top_k_index"), args, strict=False)) | kwargs
    rows = given["hidden_states"].detach()
    if not source.takes_sorted_rows:
        return batch.tokens(rows, name), batch.tokens(given["top_k_index"], name)
    # Equally many rows for each expert, with zeros where a token isn't for it.
    rows = batch.tokens(rows.reshape(source.num_experts, -1, rows.shape[-1]).transpose(0, 1), name)
    token, expert = (rows != 0).any(-1).nonzero().unbind(1)
    return rows[token, expert], expert[:, None]


@contextmanager
def counted_experts(model: nn.Module, names: Iterable[str], batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Inside, counts the tokens that go to each expert of the modules ``names``: by name, int64 ``[E]``.

    ``batch``: which rows are tokens.
    """
    modules = {name: model.get_submodule(name) for name in names}
    sources = {name: describe_experts(module) for name, module in modules.items()}
    tokens = {
        name: torch.zeros(source.num_experts, dtype=torch.int64, device="cpu") for name, source in sources.items()
    }

    def count(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen, index = tokens[name], routed_rows(sources[name], name, batch, args, kwargs)[1].flatten()
        known = index[(index >= 0) & (index < len(seen))]
        seen.add_(torch.bincount(known, minlength=len(seen)).to(seen.device))

    with hooked(modules, count):
        yield tokens


def unused_experts(tokens: Mapping[str, Tensor]) -> list[str]:
    """The experts without tokens, as ``name[expert]``; a module's name alone if none of its experts has any."""
    unused = []
    for name, counts in tokens.items():
        without = (counts == 0).nonzero().flatten().tolist()
        unused += [name] if len(without) == len(counts) else [f"{name}[{expert}]" for expert in without]
    return unused


def _all_routed_rows(block: Block, work: ExpertsWork, source: FloatExperts) -> list[tuple[Tensor, Tensor]]:
    """The ``routed_rows`` of each batch of calibration data, from a run of the block as it is now."""
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows, index = routed_rows(source, name, block.batch, args, kwargs)
        kept.append((rows.clone(), index.clone()))

    with hooked({work.name: work.module}, keep):
        for _ in block.run():
            pass
    return kept


@torch.no_grad()
def decide_experts(block: Block, work: ExpertsWork, method: str, decide: Decide, needs_rows: bool = True) -> None:
    """Sets ``work.weights`` to what ``decide`` makes of each expert's weights, and adds a note with their number.

    ``needs_rows``: whether ``decide`` needs second moments; if so, experts with fewer than ``MIN_TOKENS`` tokens are
    rounded to nearest.
    """
    source = describe_experts(work.module)
    routed = _all_routed_rows(block, work, source) if needs_rows else None
    parts: dict[str, list[QuantizedWeight]] = {"gate_up_proj": [], "down_proj": []}
    stored = {name: work.module.get_parameter(source.parameters[name]).detach() for name in parts}
    biases = None
    if source.has_bias:
        name = source.parameters["gate_up_proj_bias"]
        biases = source.bias_of("gate_up_proj", work.module.get_parameter(name).detach())
    counts, undecided = [], []
    for expert in range(source.num_experts):
        weights = [source.rows_of(name, weight, expert) for name, weight in stored.items()]
        moments: list[Tensor | None] = [None, None]
        enough = True
        if routed is not None:
            own = [rows[(index == expert).any(-1)] for rows, index in routed]
            x = torch.cat(own).float() if own else torch.empty(0, dtype=torch.float32, device="cpu")
            counts.append(len(x))
            enough = len(x) >= MIN_TOKENS
            if enough:
                bias = None if biases is None else biases[expert].float()
                hidden = source.activation(F.linear(x, weights[0].float(), bias))
                moments = [values.T @ values / len(values) for values in (x, hidden)]
        found = [
            decide(each, moment, scheme.weight) if enough else None
            for each, moment, scheme in zip(weights, moments, work.scheme.parts, strict=True)
        ]
        if any(each is None for each in found):
            undecided.append(expert)
        for name, weight, quantized, scheme in zip(parts, weights, found, work.scheme.parts, strict=True):
            parts[name].append(quantized or _nearest(weight, scheme))
    work.weights = {
        name: QuantizedWeight(*map(torch.stack, zip(*(expert.parts for expert in each), strict=True)))
        for name, each in parts.items()
    }
    work.notes.append(_said(method, source.num_experts, counts, undecided))


def _nearest(weight: Tensor, scheme: QuantScheme) -> QuantizedWeight:
    N, K = weight.shape
    linear = meta_linear(scheme, K, N)
    linear.start_rows(weight.device, largest(weight) if linear.needs_amax else None)
    return QuantizedWeight(*linear.round_rows(narrowed(weight)))


def _said(method: str, experts: int, counts: list[int], undecided: list[int]) -> str:
    text = f"{method}: {experts - len(undecided)} of {experts} experts"
    if counts:
        text += f", which saw {min(counts)} to {max(counts)} tokens"
    if undecided:
        why = f"with fewer than {MIN_TOKENS} tokens, or no gain" if counts else "without a gain"
        text += f"; rounded to nearest, {why}: {listed(undecided, show=str)}"
    return text
