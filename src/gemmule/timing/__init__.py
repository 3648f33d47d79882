"""Timing implementations against each other, and what the machine is."""
