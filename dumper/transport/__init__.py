"""Transport: shared memory, sockets and numbered messages between ranks and their recorder."""
