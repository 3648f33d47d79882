"""What writes this repository's documents; not part of the package."""
