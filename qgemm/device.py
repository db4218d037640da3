"""``find_device``: the device that somebody names, or one sentence about why it can't be used."""

from __future__ import annotations

import torch


def find_device(device: torch.device | str) -> torch.device:
    """The CPU or GPU that ``device`` names, a GPU with its number.

    Raises ``ValueError`` for one that isn't there, or of another kind, and for what is none.
    """
    try:
        found = None if isinstance(device, bool) else torch.device(device)
    except (RuntimeError, TypeError):  # no device that PyTorch knows of
        found = None
    if found is not None and found.type == "cpu":
        return found
    if found is not None and found.type == "cuda" and (found.index or 0) < torch.cuda.device_count():
        return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())
    raise ValueError(f'device is "{device}"; it must be "cpu", or "cuda" where PyTorch finds a GPU')
