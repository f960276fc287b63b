"""Sampling: from logits to tokens, for rows with any mix of parameters. Rank 0 only; other ranks follow its plans."""
