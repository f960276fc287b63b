"""Generated cases of the verdict bench: random models, bugs and pairings, determined by a seed.

Run ``python -m benchmarks.verdict --generate SEED --cases N``; see ../README.md.
"""
