"""Farewell: what is said when a recording ends."""

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
    """Name what is missing from the run: taps that never fired, and values that were lost or could not be captured.

    ``compiled`` are modules in which taps did not fire, ``unused`` rules that fitted nothing, ``never_held``
    expressions of rules and of the filter that were asked in vain. ``empty``: why there is
    no record.
    """
    counters = collector.counters
    facts = [
        (empty if run else None, f"{run} has no records: {empty}"),
        (len(compiled), compiled_sentence(compiled)),
        (len(silent), f"taps that never fired ({len(silent)}): {', '.join(silent[:4])}"),
        (len(unused), f"rules that fit nothing that was dumped: {', '.join(unused[:4])}"),
        (len(never_held), f"expressions that never held: {'; '.join(never_held[:4])}"),
        (collector.num_outside, f"{collector.num_outside} firings outside a step were not kept; use step()"),
        (counters.num_dropped if run else 0, f"{counters.num_dropped} values were dropped; {run} is incomplete"),
        (counters.num_failed, f"{counters.num_failed} values could not be captured (tapscope info says why)"),
        (lost if run else None, f"{run} is incomplete: {lost}"),
    ]
    for amount, sentence in facts:
        if amount:
            _log.warning("tapscope: %s", sentence)
