"""Matrices in files, in and out."""
