"""Conditions as strings, with bounded cost: no `eval`, no unbounded regular expression."""
