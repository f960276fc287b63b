"""Checkpoint loading from safetensors: weight mapping, sharded reads, dequantization, dummy weights."""
