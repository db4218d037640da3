"""Heads of rows times functions of gates, on a GPU."""
