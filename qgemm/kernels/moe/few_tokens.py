"""Few tokens of experts with 4- and 8-bit weights on Hopper: which weights its kernels accept, tiles, launches.

The rules were fitted to measurements on one H200 (docs/performance/experts.md); nothing is timed at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import torch

from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.expert_weights import WeightOnlyExperts, WeightOnlyPart
from qgemm.kernels.grouped.config import filled_groups, rows_of_group
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.stages.activations import DEVICE_ACTIVATIONS
from qgemm.kernels.stored_form import BLOCK_BYTES, StoredForm
from qgemm.numerics.integers import cdiv, next_power_of_2

SCALED_GROUP = 32  # values that share a power of 2
MAX_FEW_ROWS = 4.5  # of an expert, on average: then few experts have more than a program multiplies at a time
MAX_PAIRS = 1024  # that each program searches
MAX_ROUNDS = 4  # waves of programs


@dataclass(frozen=True)
class FewTokens:
    """A tile for ``_few_tokens_kernel``: up to 8 tokens by ``rows`` rows of an expert's weight."""

    splits: int
    """The number of warps that share K, block by block in turn."""
    rows: int
    depth: int
    """A warp's slots for blocks of the weight; all but one are being loaded."""
    warps: int
    count: int = 0
    """Tiles that a program computes one after the other; 0 for as many as suit the problem."""
    max_registers: int = 128
    """The number of registers per thread."""
    programs: int = 4
    """How many programs an SM holds with so many."""


FEW_TOKENS = FewTokens(4, 16, 3, 4)
OF_FLOAT_ZEROS = replace(FEW_TOKENS, max_registers=168, programs=3)


def hopper_forms(weights: WeightOnlyExperts, dtype: torch.dtype) -> list[StoredForm] | None:
    """The forms of both ``weights`` with inputs of ``dtype``; None if the kernels don't accept one."""
    forms = [form for part in weights.parts if (form := _hopper_form(part, dtype)) is not None]
    return forms if len(forms) == 2 else None


def _hopper_form(part: WeightOnlyPart, dtype: torch.dtype) -> StoredForm | None:
    if part.weight.shape[1] % 16 or part.K % 16:
        return None
    if part.global_scale is not None or dtype not in (torch.float16, torch.bfloat16):
        return None
    if part.scale.dtype == torch.uint8:
        fits = part.format == "fp4" and part.group_size == SCALED_GROUP and dtype == torch.bfloat16
        # Two exponents are loaded together.
        fits = fits and part.K % (2 * SCALED_GROUP) == 0
        return StoredForm(part.format, part.group_size) if fits else None
    if part.group_size % BLOCK_BYTES or not part.scale.is_floating_point():
        return None
    return StoredForm.of(part.format, part.group_size, part.zero_point)


def is_few(P: int, E: int) -> bool:
    """Whether ``P`` pairs of a token and a random one of ``E`` experts are few enough for the kernels."""
    return P <= MAX_PAIRS and rows_of_group(P, E) <= MAX_FEW_ROWS


def select_few_tokens(form: StoredForm) -> FewTokens:
    """The tile for a weight of this ``form``."""
    # With fewer registers, some of a factor and an addend for each group of 4-bit weights would be spilled.
    return OF_FLOAT_ZEROS if form.float_zeros and form.bits == 4 else FEW_TOKENS


def _tiles_of_program(tiles: float, tile: FewTokens, limits: DeviceLimits) -> int:
    """How many of all ``tiles`` a program computes: starting takes as long as some, but programs must end together."""
    rounds = tiles / (limits.num_sms * tile.programs)
    return max(1, ceil(rounds / MAX_ROUNDS) if rounds > MAX_ROUNDS else ceil(rounds))


def few_tokens_launch(
    T: int,
    top_k: int,
    E: int,
    N: int,
    K: int,
    form: StoredForm,
    tile: FewTokens,
    activation: GatedActivation | None,
    limits: DeviceLimits,
) -> Launch:
    """A product of rows with ``[E, N, K]``: tokens' rows, followed by ``activation``, or the rows of pairs.

    To be called with the rows, the experts by pair, the weight, scales, zero points, biases and the output.
    """
    from qgemm.kernels.moe.few_tokens_hopper_kernels import _few_tokens_kernel

    P = T * top_k
    by_pair = P < E
    gated = activation is not None and activation.gated
    columns, rows = (N // 2, tile.rows // 2) if gated else (N, tile.rows)
    if tile.count == 0:
        tile = replace(tile, count=_tiles_of_program(filled_groups(P, E) * cdiv(columns, rows), tile, limits))
    function = None if activation is None else DEVICE_ACTIVATIONS[activation.name]
    pairs = max(limits.warp_size * tile.warps, next_power_of_2(P))
    of_row = 1 if activation is None else top_k
    constants = (form, tile, function, activation, of_row, by_pair, T == 1 or not by_pair, pairs, limits.pdl)
    grid = (P if by_pair else E) * cdiv(columns, rows * tile.count)
    return Launch(
        _few_tokens_kernel, grid, (P, E, N, K), constants, tile.warps, pdl=limits.pdl, max_registers=tile.max_registers
    )  # fmt: skip
