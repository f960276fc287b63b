"""Records and tensors as lines of text, for both the command line and the terminal UI."""
