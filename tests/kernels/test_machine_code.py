"""What is read from machine code, of a few instructions at a time."""

import pytest

from tests.kernels.machine_code import overwritten_operands

PRODUCT = "IGMMA.64x128x32.S8.S8 R24, R152, gdesc[UR8], R24"
STARTED = f"{PRODUCT}, gsb0"
OTHER = "IGMMA.64x128x32.S8.S8 R24, R160, gdesc[UR8], R24, gsb0"
WAIT, WAIT_FOR_ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
WRITE = "LOP3.LUT R153, R10, 0x80808080, RZ, 0x3c, !PT"


def sass(*texts: str) -> str:
    lines = (
        f"        /*{16 * i:04x}*/  {text} ;  /* 0x{0:016x} */\n  /* 0x{0:016x} */" for i, text in enumerate(texts)
    )
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        ((STARTED, WRITE, WAIT), 1),
        ((PRODUCT, WRITE, OTHER, WAIT), 1),
        ((STARTED, "@P0 LDSM.16.M88.4 R152, [R1]", "@!P1 IMAD R155, R1, R2, R3", WAIT), 2),
        ((STARTED, WAIT, WRITE), 0),
        ((STARTED, OTHER, WAIT_FOR_ALL_BUT_ONE, WRITE), 0),
        ((OTHER, STARTED, WAIT_FOR_ALL_BUT_ONE, WRITE), 1),
        ((STARTED, "LOP3.LUT R156, R152, 0x80808080, RZ, 0x3c, !PT", "ST.E [R2.64], R153", WAIT), 0),
        # The next turn of a loop writes what the one before may still read.
        ((WRITE, STARTED, "@P0 BRA 0x0", WAIT, "EXIT"), 1),
        ((WRITE, STARTED, WAIT, "@P0 BRA 0x0", "EXIT"), 0),
        # Operands in shared memory.
        (("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", WRITE, WAIT), 0),
    ],
)
def test_operands_that_are_overwritten(texts: tuple[str, ...], count: int) -> None:
    assert overwritten_operands(sass(*texts)) == count
