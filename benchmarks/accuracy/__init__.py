"""What quantization costs trained models: ``python -m benchmarks.accuracy``; see ``docs/accuracy.md``."""
