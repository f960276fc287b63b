"""Sampling: from logits to tokens, with different parameters per row. On rank 0 only."""
