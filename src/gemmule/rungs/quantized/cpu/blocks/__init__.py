"""Products of codes by many columns: blocks of weights, decoded near the multipliers."""
