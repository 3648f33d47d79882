"""Quantised products in plain loops: any group size, code width and float dtype."""
