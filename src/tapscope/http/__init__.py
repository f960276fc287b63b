"""What the HTTP servers of the engine and of the recorder share."""
