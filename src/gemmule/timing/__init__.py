"""Measuring in turns, and what the machine is."""
