"""Products judged by the oracle, at random, by rung, on devices; and the proofs."""
