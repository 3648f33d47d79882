"""Hardware counters, and another clock."""
