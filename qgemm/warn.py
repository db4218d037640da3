"""``warn_user``: warns at the user's line that called into qgemm, however deep inside the cause is."""

from __future__ import annotations

import sys
import warnings

# qgemm, and what runs its code in between: context managers, decorators, hooks, from_pretrained.
_PASSED_OVER = ("qgemm", "contextlib", "torch", "transformers")


def warn_user(message: str) -> None:
    """Warns with ``message`` at the innermost line that is the user's own."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
