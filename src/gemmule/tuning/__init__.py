"""Find, verify and time the candidates for a problem."""
