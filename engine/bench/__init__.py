"""Measuring: an OpenAI-compatible server under load, and the engine alone, against what the machine could do."""
