"""Retention: flight recorder, triggers, budgets and per-step counters, applied to values that the rules selected."""
