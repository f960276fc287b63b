"""Continuous batching: which tokens each step computes and which KV pages store them. Torch-free; rank 0 only."""
