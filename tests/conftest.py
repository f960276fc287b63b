"""Shared by every test: the installed package is tested, never the folders at the root; GPU tests are counted."""

import sys
from pathlib import Path

import pytest

_ROOT = str(Path(__file__).resolve().parent.parent)
# `python -m pytest` puts the root on sys.path, where engine/, dumper/ and kernels/ would shadow other packages.
sys.path[:] = [entry for entry in sys.path if entry not in ("", _ROOT)]

_NO_GPU = "needs a CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=_NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Never skip silently."""
    skipped = sum(_NO_GPU in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    if skipped:
        terminalreporter.write_line(f"{skipped} gpu tests skipped: no CUDA device here")
