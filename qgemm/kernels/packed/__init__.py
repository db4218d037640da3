"""Layers whose weights are packed."""
