"""qgemm inside of other libraries. Each module imports its library as it is imported, so none is imported at once."""
