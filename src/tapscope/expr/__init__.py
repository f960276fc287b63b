"""Conditions written as text, with bounded cost: no `eval`, no unbounded regular expression."""
