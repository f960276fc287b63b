"""Verdicts: what is wrong, and where it began."""
