"""Products of two matrices: ``scaled_mm``, ``int_mm``, ``matmul``."""
