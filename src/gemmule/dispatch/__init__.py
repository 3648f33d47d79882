"""From the user's operands to a bound call: one look-up, then the kernel."""
