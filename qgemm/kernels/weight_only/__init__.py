"""Products of float inputs with quantized weights."""
