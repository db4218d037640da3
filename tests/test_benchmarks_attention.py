"""The benchmark of attention: rates are those of the cache's bytes, and wrong outputs are refused."""

import pytest
import torch

from benchmarks import attention
from qgemm_cli.timing import QUICK

pytestmark = pytest.mark.usefixtures("few_copies")

CPU = torch.device("cpu")


@torch.no_grad()
def test_rates_and_table() -> None:
    theirs, ours, int8 = attention.measure(3, 40, (4, 2), 32, QUICK, 1e9, CPU)
    assert [one.provider for one in (theirs, ours, int8)] == ["sdpa", "qgemm", "qgemm int8 cache"]
    values = 2 * 3 * 2 * 40
    for one, stored in ((theirs, 2 * 32), (ours, 2 * 32), (int8, 32 + 4)):
        assert one.tb_per_s * 1e12 * one.us / 1e6 == pytest.approx(values * stored)
        assert one.share == pytest.approx(one.tb_per_s * 1e3)
        assert 0 < one.error < attention.MAX_ERRORS[one.provider]
    header, rows = attention.table([theirs, ours, int8])
    assert rows[2][header.index("times sdpa")] == f"{theirs.us / int8.us:.2f}"


@torch.no_grad()
def test_wrong_outputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.decode_attention
    monkeypatch.setattr(attention, "decode_attention", lambda q, *rest, **options: right(q * 1.1, *rest, **options))
    with pytest.raises(ValueError, match="qgemm is wrong: relative error"):
        attention.measure(3, 40, (4, 2), 32, QUICK, 1e9, CPU)
