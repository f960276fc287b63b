"""Farewell: what is said when a recording ends."""

import logging
from pathlib import Path

from tapscope.dumper.taps.collector import Collector

_log = logging.getLogger("tapscope")


def say(
    collector: Collector, run: Path | None, silent: list[str], lost: str | None, *, unused: list[str], is_idle: bool
) -> None:
    """Name what is missing from the run: taps that never fired, and values that were lost or could not be captured.

    ``unused`` are rules that fitted nothing. ``is_idle``: taps were in place and no step was taken.
    """
    account = collector.account
    facts = [
        (is_idle, "no step was taken: the model was not called, or only inside a compiled graph, where no tap fires"),
        (len(silent), f"taps that never fired ({len(silent)}): {', '.join(silent[:4])}"),
        (len(unused), f"rules that fit nothing that was dumped: {', '.join(unused[:4])}"),
        (collector.num_outside, f"{collector.num_outside} firings outside a step were not kept; use step()"),
        (account.num_dropped if run else 0, f"{account.num_dropped} values were dropped; {run} is incomplete"),
        (account.num_failed, f"{account.num_failed} values could not be captured (tapscope info says why)"),
        (lost if run else None, f"{run} is incomplete: {lost}"),
    ]
    for amount, sentence in facts:
        if amount:
            _log.warning("tapscope: %s", sentence)
