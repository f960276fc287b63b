"""Mixtures of experts compute what transformers computes, on one rank, split by features and split by experts."""
