"""The run format: read, write, verify, repair and compact run directories."""
