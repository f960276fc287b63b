"""Metrics: distances between matched values, read once and in place."""
