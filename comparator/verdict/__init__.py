"""Verdicts: which sites differ, and where each error begins."""
