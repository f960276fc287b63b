"""Real frameworks against transformers, each in an environment of its own."""
