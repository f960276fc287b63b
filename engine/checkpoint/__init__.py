"""Reads safetensors checkpoints: weight mapping, sharded loading, dequantization, dummy weights."""
