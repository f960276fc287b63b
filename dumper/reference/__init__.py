"""Reference: use a recorded run as the reference for a live model (comparison and injection)."""
