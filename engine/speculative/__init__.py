"""Speculative decoding: proposers guess the next tokens of requests, which the scheduler verifies in one step."""
