"""Tensor-parallel layers of a decoder; each layer declares the dims of its inputs and outputs (``tap_dims``)."""
