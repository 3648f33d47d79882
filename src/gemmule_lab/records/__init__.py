"""What measurements and proofs write down."""
