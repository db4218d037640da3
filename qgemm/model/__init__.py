"""Models: which layers there are, which are quantized, their exchange and the report."""
