"""One module a document: its grid, its claims."""
