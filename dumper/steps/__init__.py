"""Steps: the step, token rows, pass and tags of a firing."""
