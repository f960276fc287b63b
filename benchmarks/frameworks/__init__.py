"""Real frameworks against transformers, each in its own environment."""
