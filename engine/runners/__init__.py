"""Runners: who steps an engine: the caller's thread, or a service that asyncio clients share."""
