"""Runs: series of records, the mesh coordinates of ranks, and the token grids of steps."""
