"""Directories of the checkout that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests/support"
FAULTS = ROOT / "tests/faults"
