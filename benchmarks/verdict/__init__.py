"""The verdict bench: does `tapscope diff` name the culprit of a known bug, and report nothing where there is none?

``python -m benchmarks.verdict``; how to add a bug: README.md in this directory.
"""
