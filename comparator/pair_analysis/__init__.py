"""Pair analysis: everything about one matched pair that does not depend on other pairs."""
