"""Reads config.json of Hugging Face checkpoints into one checked ModelConfig. Torch-free."""
