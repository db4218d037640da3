"""Is the config that ``select_config`` chooses the best there is? Every valid candidate is timed beside it."""

import torch

from benchmarks.measure import random_operand
from benchmarks.providers import INT8_ERROR
from benchmarks.results import ConfigCheck
from benchmarks.shapes import WeightShape
from benchmarks.timing import median_seconds
from qgemm.kernels import GemmConfig, quantize_rows, scaled_mm, select_config
from qgemm.kernels.gemm.config import CANDIDATES, is_valid
from qgemm.kernels.launch.device import device_limits
from qgemm_cli.check import largest_errors
from qgemm_cli.timing import QUICK, Effort, Pass, copy_count

CONTENDER = 1.3
"""Candidates that take this many times as long as the fastest in a first, short round are not timed again."""


def check_config(
    shape: WeightShape, M: int, weights: list[tuple[torch.Tensor, torch.Tensor]], effort: Effort, device: torch.device
) -> ConfigCheck:
    """The chosen config and the fastest valid one for ``M`` rows; ``weights``: copies as ``quantize_rows`` gives them.

    Raises ``ValueError`` if a candidate's output is wrong.
    """
    chosen = select_config(M, shape.N, shape.K, torch.int8, device)
    limits = device_limits(device)
    configs = dict.fromkeys([chosen, *(config for config in CANDIDATES if is_valid(config, 1, limits))])
    x = random_operand(M, shape.K, device)
    a, a_scale = quantize_rows(x)
    weight = weights[0][0] * weights[0][1][:, None]

    def make_pass(config: GemmConfig) -> Pass:
        return Pass(lambda b: scaled_mm(a, b[0].t(), a_scale, b[1], constant_b=True, config=config), weights, device)

    passes = {str(config): make_pass(config) for config in configs}
    errors = largest_errors(x, weight, {name: one.checked_output() for name, one in passes.items()})
    wrong = {name: error for name, error in errors.items() if not error <= INT8_ERROR}
    if wrong:
        raise ValueError(f"wrong outputs for M = {M}, {shape.N} x {shape.K}: {wrong}")
    first = median_seconds(passes, QUICK, device)
    fast = {
        name: one
        for name, one in passes.items()
        if name == str(chosen) or first[name] < CONTENDER * min(first.values())
    }
    seconds = median_seconds(fast, effort, device)
    best = min(seconds, key=seconds.__getitem__)
    return ConfigCheck(shape.N, shape.K, M, str(chosen), seconds[str(chosen)] * 1e6, best, seconds[best] * 1e6)


def rotated_weights(shape: WeightShape, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of a random int8 weight ``[N, K]`` with its scales, enough to pass the caches."""
    q, scale = quantize_rows(random_operand(shape.N, shape.K, device))
    return [(q.clone(), scale) for _ in range(copy_count(q.nbytes, device))]
