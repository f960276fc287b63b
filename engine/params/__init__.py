"""Settings of the engine and parameters of requests, with their validation. Torch-free."""
