"""Weights that the L2 fetches ahead of their products: ``dispatch.prefetch``."""
