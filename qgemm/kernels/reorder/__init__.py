"""Columns of rows in another order, for layers whose weight has an order of its columns."""
