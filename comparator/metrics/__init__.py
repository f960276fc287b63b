"""Metrics: how far matched values are apart, read once and in place."""
