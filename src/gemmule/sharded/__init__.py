"""Products of matrices whose rows lie on several GPUs: what needs no library but the driver."""
