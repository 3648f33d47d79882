"""Results for people: tables, plots, pages."""
