"""The list of faults, each tried a few times; `make soak` tries them many times (tests/soak.py)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_list import CannotTry, all_faults

FAULTS = all_faults()
TRIALS = [(name, seed) for name, fault in FAULTS.items() for seed in range(fault.short)]


@pytest.fixture(scope="session")
def survived(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """How often each fault was survived; said at the end, one line a fault."""
    counts: Counter[str] = Counter()
    yield counts
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and len(counts) > 1:
        lines = [f"{name:<44} {FAULTS[name].short} tried {number} survived" for name, number in counts.items()]
        reporter.write_line("\n" + "\n".join(lines))


@pytest.mark.parametrize(("name", "seed"), TRIALS, ids=[f"{name}, seed {seed}" for name, seed in TRIALS])
def test_survives(name: str, seed: int, tmp_path: Path, survived: Counter[str]) -> None:
    survived[name] += 0
    try:
        FAULTS[name].attempt(seed, tmp_path)
    except CannotTry as reason:
        pytest.skip(str(reason))
    survived[name] += 1
