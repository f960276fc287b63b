"""A recorded run as the reference of a live model."""
