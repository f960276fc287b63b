"""The OpenAI and Anthropic forms: a decoded body to a checked request, engine outputs to an answer or events.

Pure functions and values; nothing in here knows HTTP, FastAPI or torch.
"""
