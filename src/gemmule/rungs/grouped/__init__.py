"""Grouped products: each row of A meets one of many matrices, known when it runs."""
