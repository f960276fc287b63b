"""`diff` names faults seeded into the engine and is silent about benign changes: one of each, the others in soak."""

from pathlib import Path

import pytest
import seeded_faults
from seeded_faults import Case

_SHORT = ("state of another request", "chunked prefill")
_CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in _SHORT else pytest.mark.soak)
    for case in (*seeded_faults.FAULTS, *seeded_faults.BENIGN)
]


@pytest.mark.parametrize("case", _CASES)
def test_diff_names_faults_and_nothing_else(
    case: Case, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    is_right, said = seeded_faults.run_case(case, tmp_path / "case")
    assert is_right, said


def test_there_are_20_faults_and_10_benign_changes() -> None:
    assert (len(seeded_faults.FAULTS), len(seeded_faults.BENIGN)) == (20, 10)
    assert len({case.name for case in (*seeded_faults.FAULTS, *seeded_faults.BENIGN)}) == 30
