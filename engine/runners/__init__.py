"""Steps an engine in the caller's thread, or in a service that asyncio clients and DP replicas share."""
