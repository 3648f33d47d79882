"""Arrays of any library, in and out."""
