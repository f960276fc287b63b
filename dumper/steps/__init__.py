"""Steps: the step, token rows, pass and tags that each firing belongs to."""
