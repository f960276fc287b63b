"""A stand-in for SGLang 0.5 on one rank: what the plugin touches has SGLang's names. No test in here."""

__version__ = "0.5.0"
