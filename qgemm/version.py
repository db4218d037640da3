"""The version of qgemm, in a module that checkpoints and tools can read without importing the package's names."""

__version__ = "0.1.0"
