"""Taps: hooks on modules and tensors, and the collector that receives their firings."""
