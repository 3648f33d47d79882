"""What every test process does first."""

import gc

# Most of what tests make lives long: syntax trees, compiled kernels, tables of cases.
gc.set_threshold(100_000, 20, 50)
