"""The one error that a checkpoint that can't be trusted raises."""


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, of an unknown format, or of another model. Nothing was loaded."""
