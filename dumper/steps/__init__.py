"""Steps: which step, rows, pass and tags a firing belongs to."""
