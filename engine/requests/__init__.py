"""Requests and their data: validation, scheduling state, step plans, outputs."""
