"""Taps: hooks on modules and tensors, and the collector that processes their firings."""
