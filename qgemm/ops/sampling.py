"""``torch.ops.qgemm.choose_tokens``: the next tokens of a batch; ``Choice`` documents the arguments."""

from typing import Any

from qgemm.kernels.sampling.checks import check_choose_tokens
from qgemm.kernels.sampling.choice import Choice
from qgemm.kernels.sampling.dispatch import choose_tokens
from qgemm.ops.declare import operator


def _choose_tokens(*arguments: Any) -> None:
    choose_tokens(Choice(*arguments))


operator(
    "choose_tokens(Tensor scores, Tensor(a!) token, Tensor(b!) rows, Tensor(c!) counters, Tensor(d!) finished, "
    "Tensor? ends, int? padding, int minimum) -> ()",
    compute=_choose_tokens,
    fake=lambda *arguments: check_choose_tokens(Choice(*arguments)),
)
