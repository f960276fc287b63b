"""Conditions of ``--fail-on``, which make a comparison exit with code 1."""

from tapscope.core.errors import ConfigError
from tapscope.core.formatting import did_you_mean

DIFFERS = "differs"
NONFINITE = "nonfinite"
SHAPE = "shape"
PARTIAL = "partial"
MISSING = "missing"
INEXACT = "inexact"
WARNING = "warning"
DEFAULT = frozenset({DIFFERS, NONFINITE, SHAPE, PARTIAL})
CONDITIONS = {
    DIFFERS: "a site differs by more than rounding or a tolerance explains",
    NONFINITE: "NaN or infinity in one run only",
    SHAPE: "a pair of sites cannot be compared",
    PARTIAL: "data are missing or lost",
    MISSING: "a site is in one run only",
    INEXACT: "a value is not equal, even within rounding",
    WARNING: "the report has a warning",
}
"""Condition -> description, in the order of the help text."""


def parse_fail_on(text: str) -> frozenset[str]:
    """Parse conditions such as ``differs,missing``; ``default`` stands for the default set and ``none`` for no
    condition.

    Raises ConfigError for an unknown condition, and for ``none`` combined with others.
    """
    words = [word.strip() for word in text.split(",")]
    if words == ["none"]:
        return frozenset()
    conditions: set[str] = set()
    for word in words:
        if word == "default":
            conditions |= DEFAULT
        elif word in CONDITIONS:
            conditions.add(word)
        elif word == "none":
            raise ConfigError(f"invalid --fail-on {text!r}: 'none' excludes other conditions")
        else:
            known = ["default", "none", *CONDITIONS]
            hint = did_you_mean(word, known)
            raise ConfigError(f"invalid --fail-on {text!r}: unknown condition {word!r}{hint}; use {', '.join(known)}")
    return frozenset(conditions)


def format_fail_on(conditions: frozenset[str]) -> str:
    """Format conditions as a string; the inverse of :func:`parse_fail_on`."""
    return ",".join(name for name in CONDITIONS if name in conditions) or "none"
