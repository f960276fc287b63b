"""Runners: drive an engine in the caller's thread, or as a service shared by asyncio clients and DP replicas."""
