"""Number formats, and the conversion of values to them, in plain PyTorch."""
