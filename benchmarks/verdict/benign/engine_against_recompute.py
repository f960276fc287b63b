"""One forward without a cache against the engine's prefill and decoding."""

BASELINE = {"schedule": "whole"}
TARGET = [{"framework": "engine"}, {"framework": "engine", "dtype": "bfloat16", "tp": 2}]
