"""What is right: exact integers, derived bounds, the spread of NaN and Inf."""
