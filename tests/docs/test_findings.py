"""The findings page: its counts match its rows, and the tests it names exist."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/findings.md").read_text()
ROWS = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| [A-G]\d+ \|", line)]


def test_findings_states_are_counted_right() -> None:
    found = Counter(re.split("[:;,]", state)[0] for _, _, state, *_ in ROWS)
    said = {name: int(count) for name, count in re.findall(r"\*(fixed|in part|open)\*: (\d+)", PAGE)}
    assert dict(found) == said
    assert f"They reported {len(ROWS)} defects and gaps" in PAGE


def test_findings_tests_exist() -> None:
    names = [name for row in ROWS for name in re.findall(r"`([\w/]*(?:\.py)?(?:::\w+)?)`", row[3]) if name]
    file, missing = "", []
    for name in names:
        path, _, test = name.partition("::")
        file = path or file
        at = next((folder / file for folder in (ROOT / "tests", ROOT) if (folder / file).is_file()), None)
        if at is None or (test and f"def {test}(" not in at.read_text()):
            missing.append(f"{file}::{test}")
    assert len(names) > 100
    assert missing == []
