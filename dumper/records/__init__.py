"""Records: what is known of a port from its firings, and records on their way to the recorder."""
