"""The errors that a checkpoint raises if it can't be trusted."""

from __future__ import annotations

from typing import NoReturn


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, in an unknown format, or of another model. Nothing was loaded."""


class UnknownModel(CheckpointError):
    """The config of a checkpoint describes no model that can be built from it; the caller may pass one.

    ``why``: the reason, without that way out, which not every caller has.
    """

    def __init__(self, why: str) -> None:
        """``why``: see the class."""
        super().__init__(f"{why}; pass the float model, or a function that builds it, as model=")
        self.why = why


def raised(error: CheckpointError) -> NoReturn:
    """Raises ``error``: the default way to handle a problem."""
    raise error


def unsupported(what: str) -> CheckpointError:
    """The error for another library's checkpoint that is intact, but of a kind that qgemm doesn't compute.

    ``what``: the kind, and what qgemm computes. The error adds the way out.
    """
    return CheckpointError(f"{what}, so dequantize it with its own library and quantize the float model")


def said_by(error: Exception) -> str:
    """What ``error``, of another library, says: in one line of at most 500 characters."""
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, KeyError) or not text:
        text = f"{type(error).__name__} {text}".rstrip()
    return text if len(text) <= 500 else f"{text[:497]}..."
