"""Sending: where records go: to the recorder within bounds, to memory, to a terminal."""
