"""The version, read by the build and by `tapscope --version`."""

__version__ = "0.1.0"
