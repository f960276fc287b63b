"""Tensor parallelism: collectives, sharding, and heartbeats and watchdog of worker processes."""
