"""Checks outputs before anything is timed.

Every row of the output is compared with a float64 product of the unquantized operands, in parts of 2,048 columns. The
error of a part of a row is ``||out - reference|| / ||reference||``, and the largest one counts. A wrong tile, or a
missing block of K, stands out in its rows, while a norm over the whole output could hide it.
"""

import torch
from torch import Tensor

PART = 2048


def largest_errors(x: Tensor, weight: Tensor, outputs: dict[str, Tensor], part: int = PART) -> dict[str, float]:
    """By name, the largest relative error of a part of a row of each output ``[M, N]`` compared with ``x @ weight.T``.

    Infinite for an output with NaN or Inf, or with a different shape. ``part``: its number of columns.
    """
    M, N = x.shape[0], weight.shape[0]
    errors = {name: 0.0 if out.shape == (M, N) else torch.inf for name, out in outputs.items()}
    rows = x.double()
    for start in range(0, N, part):
        reference = rows @ weight[start : start + part].double().t()
        norms = torch.linalg.vector_norm(reference, dim=1).clamp(min=torch.finfo(torch.float64).tiny)
        for name, out in outputs.items():
            if errors[name] == torch.inf:
                continue
            differences = torch.linalg.vector_norm(out[:, start : start + part].double() - reference, dim=1)
            error = (differences / norms).max().item()
            errors[name] = max(errors[name], error) if error < torch.inf else torch.inf
    return errors
