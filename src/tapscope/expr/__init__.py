"""Conditions given as strings, evaluated at bounded cost: no `eval`, no unbounded regular expressions."""
