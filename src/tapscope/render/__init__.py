"""Records and tensors as lines of text, for the command line and the terminal UI alike."""
