"""Rules: conditions over metrics that replace the noise floor for matching sites.

    --rule 'lm_head:out=rel < 1e-3 and max_abs < 0.1'      or the rules of a map file

The first rule whose regular expression matches the site's name, on either side, decides. Conditions are expressions of
:mod:`tapscope.expr.expression` over :data:`MEASURES`. A metric that was not measured is None, and satisfies no
condition.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from tapscope.comparator.facts import ErrorMetrics
from tapscope.comparator.metrics.error_distribution import QUANTILES, ErrorDistribution
from tapscope.comparator.options.map_file import RuleEntry
from tapscope.core.errors import ConfigError, EvaluationError, ExpressionError, RuleError
from tapscope.core.site import describe_layers
from tapscope.expr.safe_regex import safe_pattern

if TYPE_CHECKING:
    from tapscope.expr.expression import Expression

MEASURES = {
    "rel": "1 - 2 a.b / (a.a + b.b)",
    "rel_l2": "norm of the difference / norm of the baseline",
    "sqnr": "signal-to-quantization-noise ratio in dB, -20 log10(rel_l2)",
    "max_abs": "largest absolute difference",
    "mean_abs": "mean absolute difference",
    "cosine": "cosine between both",
    "equal": "elements that are equal",
    "count": "elements",
    "nonfinite": "elements that are not finite on one side only",
    "row": "largest relative error of a row",
    "typical": "median relative error of a row",
    "ratio": "error / floor",
}
"""The names that a rule may use -> their meaning."""
# The `=` before the expression: the first one that is not part of a look-ahead or look-behind.
_SPLIT = re.compile(r"(?<!\(\?)(?<!\(\?<)=")


class Rule(Struct, frozen=True):
    """A compiled rule."""

    where: str
    pattern: re.Pattern[str]
    require: "Expression"

    @property
    def text(self) -> str:
        """The source text of the rule."""
        return f"{self.pattern.pattern}={self.require.text}"

    @property
    def sees_nonfinite(self) -> bool:
        """Whether the rule itself handles NaN and infinity."""
        return "nonfinite" in self.require.names

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether the metrics satisfy the rule; raises RuleError if the rule cannot be evaluated."""
        try:
            return bool(self.require(values))
        except EvaluationError as error:
            raise RuleError(f"{self.where}: {error}; measures are numbers: {', '.join(MEASURES)}") from None


def parse_rule(text: str) -> RuleEntry:
    """Parse ``REGEX=EXPRESSION`` from the command line; raises ConfigError."""
    split = _SPLIT.search(text)
    if split is None or not text[: split.start()].strip() or not text[split.end() :].strip():
        raise ConfigError(f"invalid --rule {text!r}: expected REGEX=EXPRESSION, such as 'lm_head:out=rel < 1e-3'")
    return RuleEntry(f"--rule {text!r}", text[: split.start()].strip(), text[split.end() :].strip())


def compile_rules(entries: Iterable[RuleEntry]) -> tuple[Rule, ...]:
    """Compile rules; raises ConfigError for an invalid pattern or condition."""
    compiled: list[Rule] = []
    for entry in entries:
        from tapscope.expr.expression import Expression  # most comparisons have no rules

        try:
            require = Expression(entry.require, MEASURES)
            if not require.is_condition:
                raise ExpressionError(f"{entry.require!r} is not a condition: expected one such as rel < 1e-3")
            compiled.append(Rule(entry.where, safe_pattern(entry.site), require))
        except (ExpressionError, ValueError) as error:
            raise ConfigError(f"{entry.where}: {error}") from None
    return tuple(compiled)


def check_rules(rules: Sequence[Rule], pairs: Sequence[tuple[str, ...]]) -> None:
    """Raise RuleError for a rule that matches no site, or only sites that earlier rules match.

    ``pairs`` contains the names of each matched pair.
    """
    used = {id(rule) for names in pairs if (rule := find_rule(rules, names))}
    for rule in rules:
        if id(rule) in used:
            continue
        if any(rule.pattern.search(name) for names in pairs for name in names):
            raise RuleError(f"{rule.where} has no effect: earlier rules match every site that it matches")
        sites = [name for names in pairs for name in names]
        raise RuleError(f"{rule.where} matches no site that both runs have; {describe_layers(sites)}")


def find_rule(rules: Sequence[Rule], names: Iterable[str]) -> Rule | None:
    """Return the first rule that matches one of ``names``."""
    if not rules:
        return None
    names = tuple(names)
    return next((rule for rule in rules if any(rule.pattern.search(name) for name in names)), None)


def measures_of(
    metrics: ErrorMetrics | None, distribution: ErrorDistribution | None, ratio: float
) -> dict[str, float | int | None]:
    """Return the values of :data:`MEASURES`; a value that was not measured is None."""
    measures: dict[str, float | int | None] = dict.fromkeys(MEASURES)
    if metrics is not None:
        for name in ("rel", "rel_l2", "sqnr", "max_abs", "mean_abs", "cosine"):
            value = getattr(metrics, name)
            measures[name] = None if math.isnan(value) else value
        measures |= {"equal": metrics.num_equal, "count": metrics.num_elements}
        measures["nonfinite"] = metrics.num_nonfinite_mismatch
    if distribution is not None:
        errors = distribution.errors
        measures |= {"typical": errors[0], "row": errors[len(QUANTILES) - 1], "ratio": ratio}
    return measures
