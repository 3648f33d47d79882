"""Other people's implementations, checked and timed beside ours."""
