"""Matching: which site of the target is which site of the baseline."""
