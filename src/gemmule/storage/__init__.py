"""Small files that last: tuned choices, ceilings, evidence; checked when read, replaced whole."""
