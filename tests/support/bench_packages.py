"""A temporary package with parts of the verdict bench, for one test."""

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def package() -> None:
    """Make `benchmarks.verdict` importable without the root on the path, where `kernels` would shadow other
    packages."""
    if "benchmarks" not in sys.modules:
        sys.modules["benchmarks"] = namespace = ModuleType("benchmarks")
        namespace.__path__ = [str(ROOT / "benchmarks")]
