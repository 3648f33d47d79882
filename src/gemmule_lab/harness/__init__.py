"""The harness: a product as data, its operand sets, benchmark entries over them, and their race."""
