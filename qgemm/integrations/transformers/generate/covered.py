"""``NotCovered``: the loop leaves a call to transformers' own."""


class NotCovered(Exception):
    """The loop doesn't cover a call; the message is the reason, as the end of a sentence."""
