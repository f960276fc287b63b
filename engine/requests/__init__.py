"""A request on its way to a generation: validation, step plans, outputs."""
