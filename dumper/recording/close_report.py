"""The warnings logged when a recording ends."""

import logging
from pathlib import Path

from tapscope.dumper.taps.collector import Collector
from tapscope.run_format.ledger import compiled_sentence

_log = logging.getLogger("tapscope")


def report_close(
    collector: Collector,
    run: Path | None,
    lost: str | None,
    *,
    silent: list[str],
    compiled: list[str],
    unused: list[str],
    empty: str | None,
    never_held: list[str],
) -> None:
    """Log what is missing from the run: taps that never fired, values that were lost or could not be captured.

    ``compiled`` are modules whose taps did not fire, ``unused`` rules that matched nothing, ``never_held`` expressions
    of rules and of the filter that were evaluated and never true. ``empty``: why there are no records.
    """
    counters = collector.counters
    facts = [
        (empty if run else None, f"{run} has no records: {empty}"),
        (len(compiled), compiled_sentence(compiled)),
        (len(silent), f"taps that never fired ({len(silent)}): {', '.join(silent[:4])}"),
        (len(unused), f"rules that match nothing that was dumped: {', '.join(unused[:4])}"),
        (len(never_held), f"expressions that were never true: {'; '.join(never_held[:4])}"),
        (collector.num_outside, f"{collector.num_outside} firings outside a step were not captured; use step()"),
        (counters.num_dropped if run else 0, f"{counters.num_dropped} values were dropped; {run} is incomplete"),
        (counters.num_failed, f"{counters.num_failed} values could not be captured (tapscope info shows why)"),
        (lost if run else None, f"{run} is incomplete: {lost}"),
    ]
    for amount, sentence in facts:
        if amount:
            _log.warning("tapscope: %s", sentence)
