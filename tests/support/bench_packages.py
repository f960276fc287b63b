"""A scratch package of the verdict bench's parts for one test."""

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def package() -> None:
    """Make `benchmarks.verdict` importable without the root on the path, where `kernels` would shadow others."""
    if "benchmarks" not in sys.modules:
        sys.modules["benchmarks"] = namespace = ModuleType("benchmarks")
        namespace.__path__ = [str(ROOT / "benchmarks")]
