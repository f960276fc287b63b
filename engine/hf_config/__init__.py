"""Parsing and validation of config.json of Hugging Face checkpoints into a ModelConfig. Torch-free."""
