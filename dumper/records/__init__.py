"""Records: what a port has shown of itself, and a value on its way to a line and its bytes."""
