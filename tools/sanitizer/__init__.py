"""CUDA rungs under the four tools of compute-sanitizer."""
