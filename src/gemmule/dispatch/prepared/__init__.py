"""Short ways of products with a prepared matrix."""
