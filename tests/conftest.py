"""Shared by every test: the installed package is tested, never the folders at the root."""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)
# `python -m pytest` puts the root on sys.path, where engine/, dumper/ and kernels/ would shadow other packages.
sys.path[:] = [entry for entry in sys.path if entry not in ("", _ROOT)]
