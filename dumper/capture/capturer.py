"""Taker: one value of a site, from the rules to a record on its way. Nothing here may raise into the model."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tapscope.core.observe import StepInfo
from tapscope.dumper.capture.native_record_writer import Pen
from tapscope.dumper.capture.pending_collectives import StillUnderway, Underway
from tapscope.dumper.capture.rule_evaluator import Decider
from tapscope.dumper.capture.tensor_unwrap import Local, unwrap
from tapscope.dumper.device.copy_tracker import Arrivals
from tapscope.dumper.pipeline.in_memory_sink import Captures
from tapscope.dumper.pipeline.send_queue import Backlog
from tapscope.dumper.records import snapshot
from tapscope.dumper.records.dedup_cache import Memo
from tapscope.dumper.records.dtensor_dims import Placed
from tapscope.dumper.records.firing import Stamp
from tapscope.dumper.records.flatten import plain_value
from tapscope.dumper.records.inflight_record import Pending
from tapscope.dumper.records.payload_slot import Slot
from tapscope.dumper.records.rule_context import moment_of
from tapscope.dumper.records.site_port import NO_LAYOUT, Layout, Port
from tapscope.dumper.records.snapshot import Taken
from tapscope.dumper.retention.retention_policy import Keeper
from tapscope.dumper.retention.step_counters import Account
from tapscope.dumper.selection.selection import Taking
from tapscope.dumper.steps.row_slicing import Part
from tapscope.run_format.ledger import encode_line

_FULL = Taking("full")


class Taker:
    """Measures, copies and queues what the rules keep."""

    def __init__(self, backlog: Backlog, keeper: Keeper, account: Account) -> None:
        self._backlog = backlog
        self._keeper = keeper
        self._account = account
        self.memo = Memo()
        self.arrivals = Arrivals(backlog, account)
        self.captures: list[Captures] = []
        """Who takes what is recorded now, in memory; nothing then goes to the run."""
        self._announced_sites: set[str] = set()
        self._seq: Iterator[int] = itertools.count()
        self._rules = Decider(keeper, account, self.memo)
        self._underway = Underway(account)
        self.pen = Pen(backlog, account, self.memo, self._send)

    def restart(self) -> None:
        """A new run begins: records are numbered from 0 and sites announced again."""
        self.pen.end()
        self._seq = itertools.count()
        self._announced_sites.clear()

    def begin(self, first: Stamp) -> None:
        """A step begins; ``first`` is the stamp of all that fire for the first time in it, without tags."""
        self.memo.forget()
        is_plain_step = not (self.captures or first.step.skipped or self._keeper.is_limited)
        if is_plain_step and self._account.sink is self._backlog:
            self.pen.begin(first, self._seq)

    def divert(self, captures: list[Captures]) -> None:
        """Hand what is recorded from now on to ``captures``, and to the run again where there are none."""
        self.settle(last=True)
        self.captures = captures
        self.pen.end()

    def end(self) -> None:
        """The step ends, or the run."""
        self.settle(last=True)
        self.pen.end()

    def take(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """Record one value at ``port``, if the rules keep it; never raises.

        Its step may have ended (a gradient): the value is then counted as late.
        """
        try:
            step = stamp.step
            if step.info.num_padding:
                leaf = _without_padding(port, leaf, step.info)
            if self.captures:
                self._divert(port, leaf, stamp)
                return
            may_pen = stamp is self.pen.stamp and port.announced and not (step.in_full or step.halted)
            if may_pen and self.pen.take(port, leaf):
                return
            if step.ended:
                self._account.note_late(step)
            if port.keep is None or step.in_full or step.halted or not snapshot.is_plain(leaf):
                self._take_carefully(port, leaf, stamp)
                return
            if not port.announced:
                self._announce_site(port)
            layout = port.latest
            rows = port.rows_in(step)
            if layout.kind is not leaf.dtype or layout.size != leaf.shape or layout.rows != rows:
                layout = port.layout(Part(leaf, rows), None, self._account.complain_of_dims)
            self._record(port, stamp, leaf, layout, port.keep == "full")
        except StillUnderway as error:
            self._underway.hold(port, leaf, stamp, error, next(self._seq))
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._account.fail(stamp.step, port.site, error)

    def settle(self, *, last: bool = False) -> None:
        """Take what collectives have computed since it came here; with ``last`` what is left has failed."""
        if self._underway:
            self._underway.settle(self._take_late, last=last)

    def _take_late(self, port: Port, leaf: Any, stamp: Stamp, numbers: Iterator[int]) -> None:
        """As :meth:`take`, for a value that was held: its record has the first of ``numbers``."""
        after, self._seq = self._seq, itertools.chain(numbers, self._seq)
        try:
            if stamp.step.ended:
                self._account.note_late(stamp.step)
            (self._divert if self.captures else self._take_carefully)(port, leaf, stamp)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._account.fail(stamp.step, port.site, error)
        finally:
            self._seq = after

    def _divert(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """A value for those who capture in memory."""
        taking = port.choice.static or self._rules.decide(port, leaf, stamp)
        if taking.keep != "off":
            for each in self.captures:
                each.add(port, leaf, stamp, taking)

    def _take_carefully(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """A value that is no ordinary tensor, or whose rule has conditions, or of which a part is kept."""
        self.settle()
        taking = _FULL if stamp.step.in_full else port.choice.static or self._rules.decide(port, leaf, stamp)
        if stamp.step.halted:
            self._account.count(stamp.step, left_out=taking.keep != "off")
        elif taking.keep != "off":
            self._take_as(port, leaf, stamp, taking)
        elif port.choice.sentinel is not None and isinstance(leaf, torch.Tensor):
            self._look(port, leaf, stamp)

    def _look(self, port: Port, leaf: torch.Tensor, stamp: Stamp) -> None:
        """The rules keep nothing here, but a trigger asks: measured, and kept in full if that makes it fire."""
        try:
            found = Local(leaf) if snapshot.is_plain(leaf) else unwrap(leaf)
        except StillUnderway:
            raise
        except Exception as error:  # noqa: BLE001 - nothing is lost that was asked for
            self._account.complain(port.site, f"no trigger can see it: {error}", stamp.step)
            return
        if not isinstance(found, Local):
            return
        layout = port.layout(Part(found.tensor), None, self._account.complain_of_dims, found.placed)
        if found.tensor.is_cuda and layout.count:
            self._await(port, stamp, found.tensor, layout, "off")
            return
        measured = snapshot.measure(found.tensor, layout, self.memo)
        if self._rules.alarmed(port, stamp, found.tensor, layout, measured):
            if not port.announced:
                self._announce_site(port)
            self._send(port, stamp, layout, snapshot.take(found.tensor, layout, self.memo, self._account.sink))

    def _take_as(self, port: Port, leaf: Any, stamp: Stamp, taking: Taking) -> None:
        """A value of which this is kept: as one record, or as the parts of an unusual tensor, which fail apart."""
        if isinstance(leaf, torch.Tensor):
            found = Local(leaf) if snapshot.is_plain(leaf) else unwrap(leaf)
            if isinstance(found, Local):
                self._record_part(port, stamp, found.tensor, taking, found.placed)
                return
            for name, part in found:
                inner = port.part_of(name)
                try:
                    self._take_as(inner, part, stamp, Taking(taking.keep, cap=taking.cap))
                except Exception as error:  # noqa: BLE001 - the other parts must go on
                    self._account.fail(stamp.step, inner.site, error)
        else:
            if not port.announced:
                self._announce_site(port)
            text = b'"value":' + encode_line(plain_value(leaf))
            self._put(Pending(port, stamp, next(self._seq), NO_LAYOUT, text, self.memo.generation))

    def _record_part(
        self, port: Port, stamp: Stamp, tensor: torch.Tensor, taking: Taking, placed: Placed | None
    ) -> None:
        if not port.announced:
            self._announce_site(port)
        part = port.part(tensor, stamp.step, taking)
        nbytes = part.tensor.numel() * part.tensor.element_size()
        full = taking.keep == "full" and (taking.cap is None or nbytes <= taking.cap)
        cap = taking.cap if taking.keep == "full" and not full else None
        self._record(port, stamp, part.tensor, port.layout(part, cap, self._account.complain_of_dims, placed), full)

    def _record(self, port: Port, stamp: Stamp, tensor: torch.Tensor, layout: Layout, full: bool) -> None:
        if tensor.is_cuda and layout.count:
            self._await(port, stamp, tensor, layout, "full" if full else "stats")
            return
        memo = self.memo
        taken = (
            snapshot.take(tensor, layout, memo, self._account.sink) if full else snapshot.measure(tensor, layout, memo)
        )
        if port.choice.sentinel is not None and self._rules.alarmed(port, stamp, tensor, layout, taken) and not full:
            taken = snapshot.take(tensor, layout, memo, self._account.sink)
        self._send(port, stamp, layout, taken)

    def _await(self, port: Port, stamp: Stamp, tensor: torch.Tensor, layout: Layout, keep: str) -> None:
        """A tensor on a device: its statistics and bytes come later, and are filled in by the drain."""
        sink, memo = self._account.sink, self.memo
        if keep == "stats" and port.choice.sentinel is None and self._await_row(port, stamp, tensor, layout):
            return
        slot = sink.reserve(layout.nbytes)
        if slot is None:
            if keep != "off":
                self._account.count(stamp.step, dropped=1)
            return
        ask = None if port.choice.sentinel is None else self._question(port, stamp, tensor, layout, slot, keep)
        holds = keep == "full" or (keep == "stats" and ask is not None)
        if tensor.requires_grad:
            tensor = tensor.detach()
        try:
            copy = self.arrivals.drain().start(tensor, layout, slot, None if holds else sink.cancel, ask)
        except BaseException:
            sink.cancel(slot)
            raise
        if keep != "off":
            payload = memo.number() if holds else None
            generation = memo.generation
            pending = Pending(port, stamp, next(self._seq), layout, b"", generation, payload, slot if holds else None)
            pending.arrival = copy
            self._put(pending)

    def _await_row(self, port: Port, stamp: Stamp, tensor: torch.Tensor, layout: Layout) -> bool:
        """Whether the device itself computes the statistics; they come later, and are filled in by the drain."""
        row = self.arrivals.drain().summarize(tensor, layout)
        if row is None:
            return False
        pending = Pending(port, stamp, next(self._seq), layout, b"", self.memo.generation)
        pending.arrival = row
        self._put(pending)
        return True

    def _question(
        self, port: Port, stamp: Stamp, tensor: torch.Tensor, layout: Layout, slot: Slot, keep: str
    ) -> Callable[[bytes], bool]:
        """Asks the triggers of the site when a value has come: whether its bytes are kept."""
        moment = moment_of(tensor, stamp)

        def ask(text: bytes) -> bool:
            fired = self._rules.asked(port, stamp, layout, text, lambda: moment)
            if keep == "off" and fired:
                if not port.announced:
                    self._announce_site(port)
                if stamp.step.ended:
                    self._account.note_late(stamp.step)
                memo = self.memo
                self._put(Pending(port, stamp, next(self._seq), layout, text, memo.generation, memo.number(), slot))
            return fired or keep == "full"

        return ask

    def _send(self, port: Port, stamp: Stamp, layout: Layout, taken: Taken | None) -> None:
        if taken is None:
            self._account.count(stamp.step, dropped=1)
            return
        memo = self.memo
        text, digest, payload, slot = taken
        pending = Pending(port, stamp, next(self._seq), layout, text, memo.generation, payload, slot)
        if self._put(pending) and slot is not None and payload is not None:
            memo.sent(digest, slot.nbytes, payload)

    def _put(self, pending: Pending) -> bool:
        with self.pen.lock:
            if self.pen.waiting:
                self.pen.pass_on()
            accepted = self._account.sink.put(pending)
        if not accepted:
            self._account.count(pending.stamp.step, dropped=1)
        elif self._keeper.is_limited:
            self._keeper.charge(pending)
        return accepted

    def _announce_site(self, port: Port) -> None:
        port.announced = True
        if port.site not in self._announced_sites:
            self._announced_sites.add(port.site)
            self._backlog.append(encode_line(port.line()))


def _without_padding(port: Port, leaf: Any, info: StepInfo) -> Any:
    """A tensor of packed tokens without the rows that pad the step; anything else as it is."""
    padded = info.grid[0] + info.num_padding
    is_packed = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == padded
    return leaf[: info.grid[0]] if is_packed and (port.dims or "").startswith("t") else leaf
