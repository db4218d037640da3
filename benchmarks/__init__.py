"""Times qgemm beside its peers: ``python -m benchmarks`` from the repository's root; see ``docs/benchmarks.md``."""
