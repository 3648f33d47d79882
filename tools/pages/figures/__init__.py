"""The drawings of the ladders' pages."""
