"""The benchmarks: ``python -m benchmarks.NAME`` or ``python benchmarks/NAME.py``, from the root."""

import sys
from pathlib import Path

# They import their neighbours by bare name, as scripts do.
sys.path.append(str(Path(__file__).parent))
