"""Steps an engine for callers in the same process: synchronous, asyncio, data-parallel replicas."""
