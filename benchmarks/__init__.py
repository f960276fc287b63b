"""Benchmarks: run ``python -m benchmarks.NAME`` or ``python benchmarks/NAME.py`` from the repository root."""

import sys
from pathlib import Path

# Benchmarks import each other by bare name, as scripts do.
sys.path.append(str(Path(__file__).parent))
