"""Recorder state: the status of all ranks, the verdict of the live comparison, and hints about problems."""

import time
from typing import Any

from tapscope.dumper.recorder.rank_connection import RankConnection
from tapscope.dumper.recorder.rank_registry import RankRegistry
from tapscope.dumper.recorder.two_phase_commit import ranks_text

DRIFT_S = 10.0
"""Time in seconds that a rank must lag behind the others before a hint is reported."""
_DEPRECATED = {"capture_left": "capture_steps_left", "ring_bytes": "shm_bytes", "ring_bytes_used": "shm_bytes_used"}
"""Deprecated field of a rank's state, kept for one release -> current field."""


def rank_states(ranks: RankRegistry) -> list[dict[str, Any]]:
    """Return the state of each rank that ever joined as a JSON object, ordered by rank."""
    return [_rank_state(rank) for _, rank in sorted(ranks.ranks.items())]


def _rank_state(rank: RankConnection) -> dict[str, Any]:
    state = {
        "rank": rank.rank,
        "host": rank.open_fields.get("host"),
        "pid": rank.pid,
        "step": rank.step,
        "epoch": rank.epoch,
        "capture_steps_left": rank.capture_steps_left,
        "records": rank.writer.records_written,
        "bytes": rank.writer.bytes_written,
        "total_records": rank.written[0],
        "total_bytes": rank.written[1],
        "status": rank.status,
        "stopped": rank.stopped,
        "idle_s": round(time.monotonic() - rank.last_progress, 1),
        **{name: value for name, value in rank.load.items() if isinstance(value, int)},
        **({"diverged_steps": rank.num_divergences} if rank.num_divergences or "compared" in rank.load else {}),
    }
    return state | {old: state[new] for old, new in _DEPRECATED.items() if new in state}


def verdict(ranks: RankRegistry) -> dict[str, Any]:
    """Return the result of the live comparison: verdict, first divergence over all ranks, and the result per rank."""
    each: list[dict[str, Any]] = [
        {
            "rank": rank.rank,
            "step": rank.step,
            "num_compared": int(rank.load.get("compared", 0)),
            "num_not_compared": int(rank.load.get("not_compared", 0)),
            "num_diverged_steps": rank.num_divergences,
            "first_divergence": rank.divergence,
        }
        for _, rank in sorted(ranks.ranks.items())
    ]
    divergences = [one["first_divergence"] for one in each if one["first_divergence"] is not None]
    first = min(divergences, key=lambda one: (one["step"], one["rank"]), default=None)
    compared = sum(one["num_compared"] for one in each)
    outcome = "differs" if first is not None else "agrees" if compared else "unknown"
    return {"verdict": outcome, "first_divergence": first, "ranks": each}


def hints(ranks: RankRegistry) -> list[str]:
    """Return hints about likely problems: missing, silent or lagging ranks, uneven calls, and unmatched rules."""
    present = ranks.present()
    sentences = [_missing(ranks), *(_silent(rank) for rank in present), _uneven_calls(present), _unmatched_rule(ranks)]
    sentences += [_lagging(rank, present) for rank in present]
    return [hint for hint in sentences if hint]


def _missing(ranks: RankRegistry) -> str | None:
    missing = [number for number in range(ranks.world_size) if number not in ranks.ranks]
    waited_s = time.monotonic() - ranks.changed
    if not ranks.ranks or not missing or waited_s < DRIFT_S:
        return None
    joined = ranks.world_size - len(missing)
    return (
        f"{joined} of {ranks.world_size} ranks joined, the last {waited_s:.0f} s ago; {ranks_text(missing)} did not: "
        "does every rank open a Dumper with this run?"
    )


def _silent(rank: RankConnection) -> str | None:
    if rank.status != "silent":
        return None
    silence_s = time.monotonic() - rank.last_received
    return f"no message from rank {rank.rank} (pid {rank.pid}) for {silence_s:.0f} s: is its process stopped?"


def _lagging(rank: RankConnection, present: list[RankConnection]) -> str | None:
    axes, coords = rank.open_fields.get("own_steps", ()), rank.open_fields["coords"]
    same = [each for each in present if all(each.open_fields["coords"].get(a) == coords.get(a) for a in axes)]
    first = max(same, key=lambda each: each.step)
    idle_s = time.monotonic() - rank.last_progress
    if rank.step >= first.step or idle_s < DRIFT_S:
        return None
    return (
        f"rank {rank.rank} has not advanced for {idle_s:.0f} s (it is in step {rank.step}, rank {first.rank} in "
        f"step {first.step}): are all ranks calling dumper.step()?"
    )


def _uneven_calls(present: list[RankConnection]) -> str | None:
    if time.monotonic() - max((rank.last_call for rank in present), default=0.0) < DRIFT_S:
        return None  # other ranks may be about to make the call
    for method in sorted({name for rank in present for name in rank.call_counts}):
        counts = {rank.rank: rank.call_counts.get(method, 0) for rank in present}
        if len(set(counts.values())) > 1:
            behind = [rank for rank, count in counts.items() if count < max(counts.values())]
            return f"{ranks_text(behind)} called {method}() less often than the others: do all ranks call it?"
    return None


def _unmatched_rule(ranks: RankRegistry) -> str | None:
    """Return a hint if a rule of the initial configuration matches no site on any rank, once all ranks joined."""
    joined = list(ranks.ranks.values())
    if len(joined) < ranks.world_size:
        return None
    rules = set.intersection(*(set(rank.unmatched) for rank in joined)) if joined else set()
    return joined[0].unmatched[min(rules)] + " on any rank" if rules else None
