"""What this machine's memory and units can do, measured."""
