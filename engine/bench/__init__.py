"""Benchmarks: load tests of OpenAI-compatible servers, and offline runs of the engine against hardware limits."""
