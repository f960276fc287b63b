"""Code shared by the HTTP servers of the engine and the recorder."""
