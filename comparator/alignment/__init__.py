"""Which rows of one side meet which of the other."""
