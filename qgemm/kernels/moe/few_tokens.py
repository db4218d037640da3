"""Few tokens of experts with 4- and 8-bit weights on Hopper: which weights its kernel accepts, tiles, launches.

The rules were fitted to measurements on one H200 (docs/performance/experts.md); nothing is timed at run time.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.expert_weights import WeightOnlyExperts, WeightOnlyPart
from qgemm.kernels.grouped.config import rows_of_group
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.launch import Launch
from qgemm.kernels.moe.kernels import _list_pairs_kernel
from qgemm.kernels.stages.activations import DEVICE_ACTIVATIONS
from qgemm.kernels.stored_form import BLOCK_BYTES, MXFP4_GROUP, VECTOR, StoredForm
from qgemm.kernels.weight_only.few_rows_config import FewRows
from qgemm.numerics.integers import cdiv, next_power_of_2

MAX_PAIRS = 4096  # that each program of the lists reads
ALONE = FewRows(2, 16, 8, 3, 2, 1, biased=False)
"""The tile of a single token, as one row's of a layer."""
ALONE_BY_VALUES = FewRows(4, 16, 8, 3, 4, 1)
"""The same where scales of small groups multiply values."""
# Of several tokens, 8, 16 or 32 at a time. An expert's rows are short, so warps don't share K.
EIGHT = FewRows(1, 64, 8, 3, 4, 8, biased=False)
EIGHT_OF_SHORT = FewRows(1, 128, 8, 2, 4, 8, biased=False)
MAX_SHORT_BLOCKS = 6  # of rows that are short
SIXTEEN = FewRows(1, 64, 16, 3, 4, 16, biased=False)
SIXTEEN_WIDE = FewRows(1, 128, 16, 2, 4, 16, biased=False)  # needs registers for 32 rows of the weight in each warp
THIRTY_TWO = FewRows(1, 64, 32, 2, 4, 32, biased=False)
# By the maximum number of an expert's rows, on average.
OF_4_BITS = {7: EIGHT, 33: SIXTEEN_WIDE}
OF_SMALL_GROUPS = {7: EIGHT, 33: SIXTEEN}
OF_VALUES = {7: EIGHT, 12: SIXTEEN, 33: THIRTY_TWO}
"""Where scales of small groups multiply 4-bit values."""
OF_8_BITS = {5: EIGHT}


def hopper_forms(weights: WeightOnlyExperts, dtype: torch.dtype) -> list[StoredForm] | None:
    """The forms of both ``weights`` with inputs of ``dtype``; None if the kernel doesn't accept one."""
    forms = [form for part in weights.parts if (form := _hopper_form(part, dtype)) is not None]
    return forms if len(forms) == 2 else None


def _hopper_form(part: WeightOnlyPart, dtype: torch.dtype) -> StoredForm | None:
    form = StoredForm.of(part.format, part.group_size, part.zero_point)
    if dtype not in (torch.float16, torch.bfloat16) or form.group % VECTOR:
        return None
    if part.K * (dtype.itemsize if form.bits == 4 else 1) % VECTOR:
        return None
    return form.of_rows(part.K, part.scale, part.zero_point)


def select_few_tokens(T: int, top_k: int, E: int, K: int, form: StoredForm) -> FewRows | None:
    """The tile for ``T`` tokens with ``top_k`` random ones of ``E`` experts each, and rows of a weight of ``K`` values.

    None if there are so many that another kernel is faster.
    """
    by_values = form.has_small_groups and not form.by_groups
    if T == 1:
        return ALONE_BY_VALUES if by_values else ALONE
    P = T * top_k
    if P > MAX_PAIRS:
        return None
    rows = rows_of_group(P, E)
    tile = next((tile for most, tile in _tiles(form, by_values).items() if rows <= most), None)
    return EIGHT_OF_SHORT if tile is EIGHT and cdiv(K, form.block) <= MAX_SHORT_BLOCKS else tile


def _tiles(form: StoredForm, by_values: bool) -> dict[int, FewRows]:
    if form.bits == 8:
        return OF_8_BITS
    if by_values:
        return OF_VALUES
    is_mxfp4 = form.name == "fp4" and form.group == MXFP4_GROUP
    return OF_4_BITS if is_mxfp4 or not form.has_small_groups else OF_SMALL_GROUPS


def list_pairs_launch(P: int, E: int, limits: DeviceLimits) -> Launch:
    """Lists of the ``P`` pairs of each expert, int32 ``[min(P, E), 1 + P]``, from the experts by pair."""
    pairs = max(limits.warp_size, next_power_of_2(P))
    constants = (P < E, pairs, limits.pdl)
    return Launch(_list_pairs_kernel, min(P, E), (P, E), constants, max(1, pairs // 256), pdl=limits.pdl)


def few_tokens_launch(
    T: int,
    top_k: int,
    E: int,
    N: int,
    K: int,
    form: StoredForm,
    tile: FewRows,
    activation: GatedActivation | None,
    limits: DeviceLimits,
) -> Launch:
    """A product of rows with ``[E, N, K]``: tokens' rows, followed by ``activation``, or the rows of pairs.

    To be called with the rows, the experts by pair, their lists of pairs (None for a single token), the weight, scales,
    zero points, global scales, biases and the output.
    """
    from qgemm.kernels.moe.few_tokens_hopper_kernels import _few_tokens_kernel

    P = T * top_k
    tile = replace(tile, gated=activation is not None and activation.gated)
    function = None if activation is None else DEVICE_ACTIVATIONS[activation.name]
    of_row = 1 if activation is None else top_k
    row_bytes = cdiv(K, form.block) * BLOCK_BYTES if form.bits == 4 else K
    groups = cdiv(K, form.group) if form.group else 1
    return Launch(
        _few_tokens_kernel, (P if T == 1 else min(P, E)) * cdiv(N, tile.rows), (P, E, N, K, row_bytes, groups),
        (form, tile, function, activation, of_row, P < E or T == 1, limits.pdl), tile.warps,
        pdl=limits.pdl, max_registers=tile.registers,
    )  # fmt: skip
