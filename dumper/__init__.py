"""Taps on a running model, and the recorder they stream to."""
