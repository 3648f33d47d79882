"""Hardware counters and instructions."""
