"""Transport between ranks and their recorder: shared memory, sockets and reliable messages."""
