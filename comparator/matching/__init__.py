"""Matching: pair each site of the target with its counterpart in the baseline."""
