"""Layers of a decoder, split over tensor-parallel ranks, each declaring what its ports look like.

A room each: `probe` (and the dims everybody uses), `linear`, `norm`, `embedding`, `rope`.
"""
