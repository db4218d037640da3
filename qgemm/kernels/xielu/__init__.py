"""xIELU, an activation with parameters, on a GPU."""
