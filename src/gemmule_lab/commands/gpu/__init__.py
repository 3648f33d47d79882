"""The commands that are about a GPU alone, one module each, as in the folder above."""
