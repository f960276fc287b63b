"""A stand-in for SGLang 0.5 on one rank: everything the plugin touches has SGLang's names. Contains no tests."""

__version__ = "0.5.0"
