"""Tokenization, incremental detokenization, chat templates and stop strings. Torch-free."""
