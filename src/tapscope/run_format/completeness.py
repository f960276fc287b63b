"""Completeness: compare the counts that a run's lines report with the records on disk."""

from collections import Counter
from typing import TYPE_CHECKING

from tapscope.run_format.directory import is_abandoned
from tapscope.run_format.ledger import Ledger

if TYPE_CHECKING:
    from tapscope.run_format.index import Event
    from tapscope.run_format.run import Run


def audit(run: "Run", rank: int | None = None) -> Ledger:
    """Build the ledger of ``run``, or of one ``rank``; problems and missing ranks appear only in the run's ledger."""
    account = Ledger(steps=len(run.steps), problems=list(run.problems) if rank is None else [])
    ranks = run.ranks if rank is None else (rank,)
    if rank is None:
        account.missing_ranks = sorted(set(range(run.world_size)) - set(run.ranks))
    _account_for_steps(account, run, ranks)
    for number in ranks:
        _account_for_rank(account, run, number)
    account.never_fired = sorted(set(account.never_fired))
    account.compiled = sorted(set(account.compiled))
    account.never_held = _on_all_ranks(run, ranks)
    if rank is None:
        account.empty = _why_empty(account, run)
    account.unknown = list(run.unknown)
    return account


def _account_for_steps(account: Ledger, run: "Run", ranks: tuple[int, ...]) -> None:
    lines = run.records.per_step()
    late = Counter((e.rank, e.fields.get("step")) for e in run.events() if _is_late_failure(e))
    for step, by_rank in sorted(run.steps.items()):
        for rank, line in sorted(by_rank.items()):
            if rank not in ranks:
                continue
            if line.skipped:
                account.skipped_steps.append((rank, step))
            counts = line.counts
            if counts is None:
                if not line.skipped:
                    account.unfinished_steps.append((rank, step))
                continue
            if counts.aborted:
                account.aborted_steps.append((rank, step, counts.aborted))
            on_disk = lines[rank, step]
            account.seen += counts.seen
            account.dropped += counts.dropped
            account.failed += counts.failed
            account.left_out += counts.left_out
            account.injected += sum(counts.injected.values())
            account.injected_sites |= dict.fromkeys(counts.injected)
            account.recorded += on_disk
            # Per step, so that a surplus in one step cannot hide a loss in another.
            account.lost += max(counts.seen - counts.dropped - counts.failed - on_disk - late[rank, step], 0)


def _account_for_rank(account: Ledger, run: "Run", rank: int) -> None:
    events, mates = run.events(rank), _step_mates(run, rank)
    account.failed += sum(map(_is_late_failure, events))
    closes = [e for e in events if e.kind == "close"]
    if any(e.fields.get("interrupted") for e in closes):
        account.interrupted_ranks.append(rank)
    account.never_fired += [site for e in closes for site in e.fields.get("never_fired", [])]
    account.compiled += [path for e in closes for path in e.fields.get("compiled", [])]
    outside = [e.fields.get("outside_step") for e in closes]
    account.outside_step += sum(number for number in outside if isinstance(number, int))
    for event in events:
        if event.kind == "budget":
            limit, value = event.fields.get("limit"), event.fields.get("value")
            step = event.fields.get("step")
            when = "before the first step" if step is None else f"at step {step}"
            account.budgets.append(f"rank {rank}: {limit} {value} was reached {when}")
    last = max((n for n, e in enumerate(events) if e.kind == "open"), default=0)
    ending = {e.kind: e for e in events[last:]}  # a rank may have connected to a new recorder after losing the first
    if "lost" in ending and ending["lost"].fields.get("cause") == "died":
        account.lost_ranks.append(rank)
    elif "lost" in ending:
        reason = ending["lost"].fields.get("reason", "the reason was not recorded")
        sentence = f"recording ended before rank {rank} did; what it captured later is not counted: {reason}"
        account.cut_off.append(sentence)
    elif "close" not in ending and "repaired" in ending:  # a repair requires that no process writes the rank
        account.cut_off.append(f"rank {rank} did not close: it or its recorder was killed; the run was repaired since")
    elif "close" not in ending:
        (account.killed_ranks if is_abandoned(run.path) else account.open_ranks).append(rank)
    elif any(rank not in by_rank and not mates.isdisjoint(by_rank) for by_rank in run.steps.values()):
        account.uneven_ranks.append(rank)


def _on_all_ranks(run: "Run", ranks: tuple[int, ...]) -> list[str]:
    """Return the expressions of rules and filters that were true on no rank, sorted."""
    closes = [[e for e in run.events(number) if e.kind == "close"] for number in ranks]
    never_held = [set(events[-1].fields.get("never_held", [])) for events in closes if events]
    return sorted(set.intersection(*never_held)) if never_held else []


def _why_empty(account: Ledger, run: "Run") -> str | None:
    """Return why the run has no records.

    None if it has records, if a rank still records, or if the flight recorder of a rank has unwritten steps.
    """
    if len(run.records) or account.open_ranks or not run.ranks:
        return None
    closes = [e for e in run.events() if e.kind in ("close", "unreleased")]
    if any(e.kind == "unreleased" for e in closes):
        return None
    reasons = (e.fields.get("empty") for e in closes)
    return next((reason for reason in reasons if isinstance(reason, str)), "nothing was captured")


def _step_mates(run: "Run", rank: int) -> frozenset[int]:
    """Return the ranks that take the same steps as ``rank``.

    Ranks with a different coordinate along an axis of the manifest's ``own_steps`` step independently.
    """
    mine = run.coords(rank)
    return frozenset(
        each for each in run.ranks if _own_step_coords(run, run.coords(each)) == _own_step_coords(run, mine)
    )


def _own_step_coords(run: "Run", coords: dict[str, int]) -> list[int | None]:
    return [coords.get(axis) for axis in run.manifest.get("own_steps", ())]


def _is_late_failure(event: "Event") -> bool:
    return event.kind == "failed" and bool(event.fields.get("late"))
