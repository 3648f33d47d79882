"""Quantised products in the tile registers of AMX."""
