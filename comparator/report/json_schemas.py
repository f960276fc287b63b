"""JSON schemas: the names that fields and values of the report have in each schema of ``diff --json``.

Schema 2 (``tapscope.diff/2``) is the default. Schema 1 is deprecated: it is printed by ``--json-schema 1`` for one
release, and goes away with the tables of this file.
"""

from collections.abc import Mapping
from typing import Any

from tapscope.comparator.facts import ErrorMetrics, RowCounts, StepResult
from tapscope.comparator.report.report import Header
from tapscope.comparator.verdict.coverage import Coverage
from tapscope.comparator.verdict.finding import Finding
from tapscope.comparator.verdict.localise import Divergence

SCHEMAS: Mapping[int, int | str] = {1: 1, 2: "tapscope.diff/2"}
"""Number -> ``schema`` of every line."""
SUMMARY = {"counts": "num_findings", "closest_call": "max_ratio"}
"""Member of the summary -> its name in schema 2."""
_TESTS = {
    "typical": "median_row",
    "tail": "p90_p98_row",
    "row": "max_row",
    "gain": "scale",
    "peak": "max_element",
    "grid": "fp8_grid",
    "function": "activation",
    "identity": "gradient_identity",
    "absent": "missing_gradient",
}
_INPUTS = {"around": "enclosing_module", "before": "preceding", "inside": "submodules", "same": "aliased"}
FIELDS: Mapping[type, Mapping[str, str]] = {
    Header: {"steps": "num_steps", "records": "num_records"},
    Finding: {"growth": "added_error_ratio", "numbers": "metrics"},
    RowCounts: {name: f"num_{name}" for name in RowCounts.__struct_fields__},
    ErrorMetrics: {
        "equal": "num_equal",
        "count": "num_elements",
        "over": "num_over_tolerance",
        "nonfinite_baseline": "num_nonfinite_baseline",
        "nonfinite_target": "num_nonfinite_target",
        "nonfinite_mismatch": "num_nonfinite_mismatch",
    },
    StepResult: {"rows": "num_rows", "nonfinite": "num_nonfinite_mismatch"},
    Divergence: {"others": "alternatives"},
    Coverage: {
        "sites_matched": "num_sites_matched",
        "sites_only_baseline": "num_sites_only_baseline",
        "sites_only_target": "num_sites_only_target",
        "sites_not_comparable": "num_sites_not_comparable",
        "sites_unread": "num_sites_unread",
        "rows_aligned": "num_rows_aligned",
        "rows_forked": "num_rows_forked",
        "rows_unaligned": "num_rows_unaligned",
        "rows_again": "num_rows_recomputed",
        "rows_superseded": "num_rows_replaced",
    },
}
"""Class -> its member -> the name of the field in schema 2, where that is another one."""
VALUES: Mapping[tuple[type, str], Mapping[str, str]] = {
    (Finding, "test"): _TESTS,
    (Finding, "inputs"): _INPUTS,
    (Finding, "judged_by"): {"twin": "noise_run", "identity": "gradient_identity"},
    (Finding, "matched_by"): {"absent": "missing_gradient"},
}
"""(Class, member) -> value -> the same in schema 2."""


DESCRIPTIONS: Mapping[tuple[type, str], str] = {
    (Finding, "test"): (
        "Which test decided: median_row, p90_p98_row, max_row, scale, channel, element, max_element (errors), "
        "exact, tolerance, rule, permuted, shape, nonfinite, plain, replicas, recompute, missing_gradient (only one "
        "run has one), gradient_identity (not what it was made of), fp8_grid (rows of 8-bit numbers in the target "
        "alone), activation (another activation function)."
    ),
    (Finding, "inputs"): (
        "Which sites stand for its inputs: captured, submodules, enclosing_module, preceding (fired before), aliased "
        "(it holds the bytes of another site), or empty."
    ),
    (Finding, "judged_by"): (
        "What decided: rounding (the model), noise_run, rule REGEX=EXPR, tolerance, gradient_identity, equality, or "
        "--allow-differ GLOB."
    ),
}
"""(Class, member) -> what it says in schema 2, where its values have other names than in Python."""


def test_name(test: str) -> str:
    """A :attr:`~.finding.Finding.test` as schema 2 has it."""
    return _TESTS.get(test, test)


def named(kind: type, members: Mapping[str, Any]) -> dict[str, Any]:
    """The members of an object of this class under the names, and with the values, of schema 2."""
    fields = FIELDS.get(kind, {})
    found = {fields.get(name, name): value for name, value in members.items()}
    for (owner, name), values in VALUES.items():
        if owner is kind:
            found[name] = values.get(found[name], found[name])
    return found
