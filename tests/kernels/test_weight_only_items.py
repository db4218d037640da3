"""Which blocks programs compute: each of every tile once, and parts of a tile by the programs that it says."""

import pytest
import torch
import triton
import triton.language as tl

from qgemm.kernels.stages import GemmContext, ScheduleContext
from qgemm.kernels.weight_only.items import Items

ROWS, COLS = 32, 128


@triton.jit
def items_kernel(
    out, turns, M, N, alone, blocks, sharers, ROWS: tl.constexpr, COLS: tl.constexpr, SHARES: tl.constexpr
):
    ctx = GemmContext(ROWS, COLS, 64, 1, 1, 8)
    items = Items(ScheduleContext(M, N, 64, ctx), alone, blocks, sharers, SHARES)
    tl.store(turns + tl.program_id(0), items.turns())
    for turn in range(items.turns()):
        row, col, first, last, shared = items.place(turn)
        here = out + (tl.program_id(0) * 8 + turn) * 7
        tl.store(here, row)
        tl.store(here + 1, col)
        tl.store(here + 2, first)
        tl.store(here + 3, last)
        tl.store(here + 4, shared)
        if SHARES:
            first_program, last_program = items.sharers_of(tl.maximum(shared, 0))
            tl.store(here + 5, first_program)
            tl.store(here + 6, last_program)


@pytest.mark.parametrize(
    ("M", "N", "blocks", "programs", "alone", "sharers"),
    [
        (64, 384, 5, 4, 6, 0),  # none is shared
        (64, 384, 5, 12, 0, 12),  # two programs a tile
        (64, 384, 5, 7, 0, 7),  # ranges go from one tile to the next
        (70, 520, 3, 7, 7, 7),
        (70, 520, 16, 13, 13, 4),  # sharers are the first programs
        (33, 300, 4, 6, 0, 6),  # as many as tiles
        (32, 128, 9, 9, 0, 9),
    ],
)
def test_every_block_is_computed_once(
    M: int, N: int, blocks: int, programs: int, alone: int, sharers: int, device: torch.device
) -> None:
    out = torch.full((programs, 8, 7), -9, dtype=torch.int32, device=device)
    turns = torch.zeros(programs, dtype=torch.int32, device=device)
    items_kernel[(programs,)](out, turns, M, N, alone, blocks, sharers, ROWS, COLS, sharers > 0)
    done: dict[tuple[int, int, int], int] = {}
    parts: dict[int, list[int]] = {}
    said: dict[int, list[int]] = {}
    places = []
    order: dict[int, list[int]] = {}
    for program in range(programs):
        for turn in range(turns[program]):
            row, col, first, last, shared, first_program, last_program = out[program, turn].tolist()
            assert 0 <= first < last <= blocks
            for block in range(first, last):
                done[row, col, block] = done.get((row, col, block), 0) + 1
            if shared >= 0:
                parts.setdefault(shared, []).append(program)
                said[shared] = list(range(first_program, last_program + 1))
                order.setdefault(program, []).append(shared)
                places.append(program + shared)
            else:
                assert (first, last) == (0, blocks)
    tiles = triton.cdiv(M, ROWS) * triton.cdiv(N, COLS)
    assert len(done) == tiles * blocks
    assert set(done.values()) == {1}
    assert len(parts) == (tiles - alone if sharers else 0)
    assert parts == said
    assert len(set(places)) == len(places)
    assert all(place < sharers + tiles - alone for place in places)
    # The last sharer of a tile waits for the others, so none of them may wait for another tile before.
    assert all(own == sorted(own, reverse=True) for own in order.values())
