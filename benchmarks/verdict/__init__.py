"""The verdict bench: does `tapscope diff` name the culprit of a known bug, and report nothing for a benign change?

Run ``python -m benchmarks.verdict``; README.md in this directory explains how to add a bug.
"""
