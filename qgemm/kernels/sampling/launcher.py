"""Launcher of ``choose_tokens`` on GPU tensors, CPU tensors in Triton's interpreter."""

from typing import NamedTuple

import torch

from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.launch.plans import plans
from qgemm.kernels.sampling.choice import Choice
from qgemm.kernels.sampling.kernels import _choose_kernel, _largest_kernel
from qgemm.numerics.integers import cdiv, next_power_of_2

PART, MAX_PART = 1024, 8192  # scores per program, with few rows and with many
FEW_ROWS = 8
MAX_KEYS = 4096  # of the parts of some rows, that the choosing program reads at a time


class Plan(NamedTuple):
    """The launches of calls of a kind, and how many parts all rows have."""

    largest: Launch
    choose: Launch
    parts: int


def choose_tokens(choice: Choice) -> None:
    """``dispatch.choose_tokens`` on a GPU."""
    scores, token, rows, counters, finished, ends, padding, minimum = choice
    if scores.stride(1) != 1:
        scores = scores.contiguous()
        choice = choice._replace(scores=scores)
    kind = (
        choose_tokens, scores.shape, scores.stride(0), scores.dtype, scores.device, rows.shape[0], counters.numel(),
        None if ends is None else ends.numel(), padding, minimum,
    )  # fmt: skip
    plan: Plan | None = plans.get(kind)
    if plan is None:
        plan = plans.keep(kind, _make_plan(choice))
    largest = scores.new_empty((plan.parts,), dtype=torch.int64)
    if plan.parts:
        plan.largest(scores, ends, counters, largest)
    plan.choose(largest, token, rows, counters, finished.view(torch.int8), ends)


def _make_plan(choice: Choice) -> Plan:
    scores, ends, counters = choice.scores, choice.ends, choice.counters
    (B, V), limits = scores.shape, device_limits(scores.device)
    block = min(PART if B <= FEW_ROWS else MAX_PART, next_power_of_2(V))
    parts, count = cdiv(V, block), 0 if ends is None else ends.numel()
    largest = Launch(
        _largest_kernel, B * parts, (V, parts, counters.numel(), count, scores.stride(0), choice.minimum),
        (block, limits.pdl, limits.pdl), num_warps=max(1, min(8, block // 256)), pdl=limits.pdl,
    )  # fmt: skip
    width = max(32, next_power_of_2(parts))
    at_once = max(1, min(next_power_of_2(B), MAX_KEYS // width))
    choose = Launch(
        _choose_kernel, 1, (B, parts, choice.rows.shape[0], counters.numel(), count, choice.padding or 0),
        (choice.padding is not None, at_once, width, limits.pdl, False), num_warps=4, pdl=limits.pdl,
    )  # fmt: skip
    return Plan(largest, choose, B * parts)
