"""Continuous batching: which tokens each step computes, and which KV pages hold them. Torch-free, rank 0 only."""
