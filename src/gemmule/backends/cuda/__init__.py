"""NVIDIA GPUs: compile at run time, pack one struct, launch."""
