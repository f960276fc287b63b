"""Retention: what reaches the disk after the rules have decided, and the counters of each step."""
