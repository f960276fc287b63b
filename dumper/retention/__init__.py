"""Keeping: what decides beside the rules what reaches the disk, and what was counted."""
