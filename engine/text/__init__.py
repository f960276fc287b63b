"""Tokenizing, incremental detokenizing, chat templates and stop strings. Torch-free."""
