"""The choice of a step's tokens, wherever the tensors are; as ``dispatch.py``."""

import torch

from qgemm.kernels.checks import on_gpu
from qgemm.kernels.sampling.checks import check_choose_tokens
from qgemm.kernels.sampling.choice import Choice
from qgemm.kernels.sampling.reference import choose_tokens_reference


def choose_tokens(choice: Choice) -> None:
    """Chooses the first of the largest scores of each row, and records the step of a decoding loop, in place.

    NaN counts as larger than all numbers.
    """
    check_choose_tokens(choice)
    if on_gpu(choice.scores):
        from qgemm.kernels.sampling import launcher  # imports Triton

        launcher.choose_tokens(choice)
        return
    with torch.no_grad():
        choose_tokens_reference(choice)
