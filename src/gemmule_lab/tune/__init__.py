"""What the tuner is asked, and how far heuristics are from it."""
