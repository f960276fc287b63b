"""Tensor parallelism: collectives, sharding, heartbeats and the watchdog of worker processes."""
