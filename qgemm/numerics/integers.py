"""Functions of whole numbers, for the sizes of blocks and grids."""


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return cdiv(size, multiple) * multiple


def next_power_of_2(count: int) -> int:
    """The smallest power of 2 that is at least ``count``, and at least 1."""
    return 1 << max(count - 1, 0).bit_length()
