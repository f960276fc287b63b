"""Decider: what the rules and the triggers of a site say of one value."""

from collections.abc import Callable
from typing import Any

import torch

from tapscope.dumper.records import snapshot
from tapscope.dumper.records.dedup_cache import Memo
from tapscope.dumper.records.firing import Stamp
from tapscope.dumper.records.rule_context import moment_of
from tapscope.dumper.records.site_port import Layout, Port
from tapscope.dumper.records.snapshot import Taken
from tapscope.dumper.retention.retention_policy import Keeper
from tapscope.dumper.retention.step_counters import Account
from tapscope.dumper.selection.selection import Moment, Taking


class Decider:
    """Asks them, and says of each site once what is wrong with its conditions."""

    def __init__(self, keeper: Keeper, account: Account, memo: Memo) -> None:
        self._keeper = keeper
        self._account = account
        self._memo = memo

    def decide(self, port: Port, leaf: Any, stamp: Stamp) -> Taking:
        """What is kept of this value, where only its firing tells."""
        taking = port.choice.decide(moment_of(leaf, stamp))
        if port.choice.problem is not None and not port.complained:
            port.complained = True
            self._account.complain(port.site, port.choice.problem)
        return taking

    def alarmed(self, port: Port, stamp: Stamp, tensor: torch.Tensor, layout: Layout, taken: Taken | None) -> bool:
        """Ask the triggers of the site; whether the step, and what was only measured here, is to be kept in full."""
        text = (taken or snapshot.measure(tensor, layout, self._memo))[0]
        return self.asked(port, stamp, layout, text, lambda: moment_of(tensor, stamp))

    def asked(self, port: Port, stamp: Stamp, layout: Layout, text: bytes, moment: Callable[[], Moment]) -> bool:
        """The same of a value whose statistics are told by ``text``, members of its line."""
        sentinel = port.choice.sentinel
        assert sentinel is not None
        fired = sentinel.fired(text, moment)
        if sentinel.problem is not None and not port.complained:
            port.complained = True
            self._account.complain(port.site, sentinel.problem, stamp.step)
        capped = '"cap":' in layout.text
        return bool(fired) and self._keeper.sound(fired, port.site, stamp.step) and not capped
