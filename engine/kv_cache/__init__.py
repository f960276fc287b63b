"""Paged KV cache on the device: layout, dtype, scales, and one step's view of the cache."""
