"""The list of faults, each tried a few times; `make soak` tries them many times (tests/faults/soak.py)."""

from collections import Counter
from pathlib import Path

import pytest
from fault_list import CannotTry, all_faults

FAULTS = all_faults()
TRIALS = [(name, seed) for name, fault in FAULTS.items() for seed in range(fault.short)]


class Summary:
    """One line a fault at the end of the session: how often it was tried and survived."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.survived: Counter[str] = Counter()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("faults")
        for name, number in self.tried.items():
            terminalreporter.write_line(f"{name:<44} {number:>3} tried {self.survived[name]:>3} survived")


@pytest.fixture(scope="session")
def summary(request: pytest.FixtureRequest) -> Summary:
    """Counts what the session tries."""
    counts = Summary()
    request.config.pluginmanager.register(counts)
    return counts


@pytest.mark.parametrize(("name", "seed"), TRIALS, ids=[f"{name}, seed {seed}" for name, seed in TRIALS])
def test_survives(name: str, seed: int, tmp_path: Path, summary: Summary) -> None:
    try:
        FAULTS[name].attempt(seed, tmp_path)
    except CannotTry as reason:
        pytest.skip(str(reason))
    except BaseException:
        summary.tried[name] += 1
        raise
    summary.tried[name] += 1
    summary.survived[name] += 1
