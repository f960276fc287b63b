"""Regular expressions with a bounded matching cost, checked at compile time.

Python's ``re`` backtracks: ``(a+)+$`` on thirty characters takes minutes and cannot be interrupted. A pattern from a
configuration runs inside the user's forward. :func:`safe_pattern` therefore estimates the number of backtracking paths
on a string of :data:`MAX_SUBJECT` characters and rejects patterns beyond the budget.
"""

import math
import re
import warnings
from functools import lru_cache
from importlib import import_module
from typing import Any

MAX_SUBJECT = 256
"""Maximum length of a searched string in characters."""
_MAX_WAYS_LOG2 = 3.01 * math.log2(MAX_SUBJECT + 1)  # three consecutive unbounded repeats
_PARSER: Any = import_module("re._parser")


@lru_cache(maxsize=1024)
def safe_pattern(text: str) -> re.Pattern[str]:
    """Compile ``text``; raises ValueError with the reason if the pattern is invalid or potentially too slow."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree, pattern = _PARSER.parse(text), re.compile(text)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"invalid regular expression {text[:80]!r}: {error or type(error).__name__}") from None
    if _ways(tree) > _MAX_WAYS_LOG2:
        raise ValueError(
            f"{text[:80]!r} may take too long: at most three repeats of open length, and none inside another; "
            "several simple searches joined by 'and' do the same"
        )
    return pattern


def _ways(items: Any) -> float:
    """Return the binary logarithm of the number of backtracking paths of a sequence."""
    return sum(_ways_of(str(kind), content) for kind, content in items)


def _ways_of(kind: str, content: Any) -> float:
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        low, high, body = int(content[0]), min(int(content[1]), MAX_SUBJECT), _ways(content[2])
        return math.log2(max(high - low, 0) + 1) + body * max(low, high)
    if kind == "BRANCH":
        return math.log2(len(content[1])) + max(_ways(each) for each in content[1])
    if kind == "SUBPATTERN":
        return _ways(content[3])
    if kind == "ATOMIC_GROUP":
        return _ways(content)
    if kind in ("ASSERT", "ASSERT_NOT"):
        return _ways(content[1])
    if kind == "GROUPREF_EXISTS":
        return 1 + max(_ways(content[1]), _ways(content[2] or ()))
    return 0.0
