"""The recorder: the process that writes the records of all ranks and controls their capture."""
