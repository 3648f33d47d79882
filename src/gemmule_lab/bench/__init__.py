"""Products timed beside their peers."""
