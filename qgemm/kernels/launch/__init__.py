"""Launching compiled kernels: plans, the driver, tensor maps, memory of streams."""
