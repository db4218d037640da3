"""Routing of tokens to experts, and the product ahead of it."""
