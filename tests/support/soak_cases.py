"""Cases and examples that `make soak` runs and `make test` does not."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

EXAMPLES = int(os.environ.get("TAPSCOPE_EXAMPLES", "1"))
"""Factor on the examples of a property: 20 in `make soak`."""


def mostly_soak(values: Iterable[Any], *, default: Collection[Any]) -> list[Any]:
    """Return ``values`` for ``parametrize``: those in ``default`` run in `make test` as well."""
    values = list(values)
    missing = [each for each in default if each not in values]
    if missing:
        raise ValueError(f"not among the cases: {missing}")
    return [each if each in default else _soak(each) for each in values]


def _soak(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.soak)
