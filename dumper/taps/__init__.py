"""Taps: hooks on modules and tensors, and the collector that hears them."""
