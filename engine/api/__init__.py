"""OpenAI, Anthropic and SGLang APIs: parse request bodies, and build responses and events from engine outputs.

Pure functions and value types; this package does not depend on HTTP, FastAPI or torch.
"""
