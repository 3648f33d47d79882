"""Document 001's products from host to host: each way, timed in turns; where memory ends."""
