"""Rows times a block-diagonal Walsh-Hadamard matrix, on a GPU."""
