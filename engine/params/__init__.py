"""Settings of the engine and parameters of requests, and their validation. Torch-free."""
