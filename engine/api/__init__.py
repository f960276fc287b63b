"""OpenAI, Anthropic and SGLang APIs: parse request bodies, and build responses and events from engine outputs.

Pure functions and values without HTTP, FastAPI or torch.
"""
