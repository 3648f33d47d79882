"""The lab: verify, measure, report, and the command line; it imports the library, never back."""
