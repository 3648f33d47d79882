"""What the hardware counts of every CUDA rung, and our clock beside that of NVBench."""
