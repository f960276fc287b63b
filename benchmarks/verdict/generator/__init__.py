"""Generated cases of the verdict bench: random models, bugs and pairings, seeded by number.

``python -m benchmarks.verdict --generate SEED --cases N``; see README.md one folder up.
"""
