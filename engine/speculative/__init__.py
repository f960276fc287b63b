"""Speculative decoding: proposers draft the next tokens of requests, which the scheduler verifies in one step."""
