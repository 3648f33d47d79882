"""Rungs; the directory is the registry (see gemmule.core.rung)."""
