"""Models: finding their layers, choosing which are quantized, swapping them, and the report."""
