"""Number formats and how values become them, in plain PyTorch."""
