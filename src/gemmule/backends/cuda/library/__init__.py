"""Products of the vendor's library: its C interface, and launching it."""
