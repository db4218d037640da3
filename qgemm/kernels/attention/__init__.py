"""Attention of a few new tokens to the keys and values in a cache."""
