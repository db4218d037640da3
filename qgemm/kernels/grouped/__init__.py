"""Products of groups of rows: ``grouped_mm``."""
