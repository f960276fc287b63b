"""The benchmarks: ``python -m benchmarks.NAME`` or ``python benchmarks/NAME.py``, from the root."""

import sys
from pathlib import Path

# They import what lies beside them by its bare name, as a script finds it.
sys.path.append(str(Path(__file__).parent))
