"""Schemas of ``diff --json``: names of fields and values in each schema version.

Schema 2 (``tapscope.diff/2``), the default, has the names and values of the Python classes. Schema 1 is deprecated: it
has the former names, is available through ``--json-schema 1`` for one release, and will be removed together with this
module.
"""

from collections.abc import Mapping
from typing import Any

from tapscope.comparator.verdict.finding import Finding
from tapscope.core.deprecation import deprecated_names_of

SCHEMAS: Mapping[int, int | str] = {1: 1, 2: "tapscope.diff/2"}
"""Schema number -> value of the ``schema`` field in every line."""
SUMMARY = {"num_findings": "counts", "max_ratio": "closest_call"}
"""Field of the summary -> its name in schema 1."""
_TESTS = {
    "median_row": "typical",
    "p90_p98_row": "tail",
    "max_row": "row",
    "scale": "gain",
    "max_element": "peak",
    "fp8_grid": "grid",
    "activation": "function",
    "gradient_identity": "identity",
    "missing_gradient": "absent",
}
_INPUTS = {"enclosing_module": "around", "preceding": "before", "submodules": "inside", "aliased": "same"}
_VALUES: Mapping[tuple[type, str], Mapping[str, str]] = {
    (Finding, "test"): _TESTS,
    (Finding, "inputs"): _INPUTS,
    (Finding, "judged_by"): {"noise_run": "twin", "gradient_identity": "identity"},
    (Finding, "matched_by"): {"missing_gradient": "absent"},
}
"""(class, field) -> value -> its name in schema 1."""


def test_in_schema_1(test: str) -> str:
    """Return the schema 1 name of a :attr:`~..verdict.finding.Finding.test`."""
    return _TESTS.get(test, test)


def in_schema_1(kind: type, members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object of class ``kind`` with the names and values of schema 1."""
    former = {new: old for old, new in deprecated_names_of(kind).items()}
    renamed = {former.get(name, name): value for name, value in members.items()}
    for (owner, name), values in _VALUES.items():
        if owner is kind:
            renamed[name] = values.get(renamed[name], renamed[name])
    return renamed
