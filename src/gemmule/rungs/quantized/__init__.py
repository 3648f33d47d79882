"""Rungs; the directory is the registry (see gemmule.rung)."""
