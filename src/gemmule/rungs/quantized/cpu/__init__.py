"""The CPU ladder of products with quantised matrices."""
