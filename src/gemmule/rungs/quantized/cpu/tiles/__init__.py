"""Quantised products of sixteen rows at a time, one in each lane of a vector register."""
