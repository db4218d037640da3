"""The version of qgemm, which checkpoints and tools may ask for without importing the package's names."""

__version__ = "0.1.0"
