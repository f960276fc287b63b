"""Sampling: from logits to tokens, for rows of any mixture of parameters. Rank 0 only; the other ranks obey."""
