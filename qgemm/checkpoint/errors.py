"""The one error that a checkpoint that can't be trusted raises."""

from __future__ import annotations

from typing import NoReturn


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, of an unknown format, or of another model. Nothing was loaded."""


class UnknownModel(CheckpointError):
    """The config of a checkpoint describes no model that can be built from it; another one may be given.

    ``why``: without that way out, which not everybody has.
    """

    def __init__(self, why: str) -> None:
        """``why``: as of the class."""
        super().__init__(f"{why}; pass the float model, or a function that builds it, as model=")
        self.why = why


def raised(error: CheckpointError) -> NoReturn:
    """Raises ``error``: what is done about a problem unless the caller says otherwise."""
    raise error


def unsupported(what: str) -> CheckpointError:
    """The error for another library's checkpoint that is sound, but of a kind that qgemm doesn't compute.

    ``what``: the kind, and what qgemm computes. The error names the way out as well.
    """
    return CheckpointError(f"{what}, so dequantize it with its own library and quantize the float model")
