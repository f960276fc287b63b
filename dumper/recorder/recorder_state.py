"""State: what the recorder tells of itself, its ranks and what looks wrong with them."""

import time
from typing import TYPE_CHECKING, Any

from tapscope.dumper.recorder.two_phase_commit import ranks_text

if TYPE_CHECKING:
    from tapscope.dumper.recorder.rank_connection import Peer
    from tapscope.dumper.recorder.rank_registry import Roll

DRIFT_S = 10.0
"""A rank that lags behind the others for so long gets a hint."""


def rank_states(roll: "Roll") -> list[dict[str, Any]]:
    """One object a rank that ever came, in order."""
    return [_rank_state(peer) for _, peer in sorted(roll.peers.items())]


def _rank_state(peer: "Peer") -> dict[str, Any]:
    return {
        "rank": peer.rank,
        "host": peer.opening.get("host"),
        "pid": peer.pid,
        "step": peer.step,
        "epoch": peer.epoch,
        "capture_left": peer.capture_left,
        "records": peer.writer.lines_written,
        "bytes": peer.writer.bytes_written,
        "total_records": peer.written[0],
        "total_bytes": peer.written[1],
        "status": peer.status,
        "stopped": peer.stopped,
        "idle_s": round(time.monotonic() - peer.moved, 1),
        **{name: value for name, value in peer.load.items() if isinstance(value, int)},
    }


def absent_ranks(roll: "Roll") -> dict[int, str]:
    """Ranks of the world that cannot be asked -> why."""
    absent = dict.fromkeys(range(roll.world_size), "missing")
    for rank, peer in roll.peers.items():
        absent.pop(rank, None)
        if peer.gone is not None:
            absent[rank] = peer.gone
    return absent


def hints(roll: "Roll") -> list[str]:
    """What suggests that not all ranks make the same calls; empty when nothing does."""
    present = roll.present()
    found = [_missing(roll), *(_silent(peer) for peer in present), _uneven_calls(present), _hopeless(roll)]
    found += [_lagging(peer, present) for peer in present]
    return [hint for hint in found if hint]


def _missing(roll: "Roll") -> str | None:
    missing = [rank for rank in range(roll.world_size) if rank not in roll.peers]
    waited_s = time.monotonic() - roll.changed
    if not roll.peers or not missing or waited_s < DRIFT_S:
        return None
    came = roll.world_size - len(missing)
    return (
        f"{came} of {roll.world_size} ranks came, the last {waited_s:.0f} s ago; {ranks_text(missing)} did not: "
        "does every rank open a Dumper with this run?"
    )


def _silent(peer: "Peer") -> str | None:
    if peer.status != "silent":
        return None
    silence_s = time.monotonic() - peer.heard
    return f"rank {peer.rank} (pid {peer.pid}) has said nothing for {silence_s:.0f} s: is its process stopped?"


def _lagging(peer: "Peer", present: list["Peer"]) -> str | None:
    axes, coords = peer.opening.get("own_steps", ()), peer.opening["coords"]
    alike = [each for each in present if all(each.opening["coords"].get(a) == coords.get(a) for a in axes)]
    first = max(alike, key=lambda each: each.step)
    idle_s = time.monotonic() - peer.moved
    if peer.step >= first.step or idle_s < DRIFT_S:
        return None
    return (
        f"rank {peer.rank} has not taken a step for {idle_s:.0f} s (it is in step {peer.step}, rank {first.rank} in "
        f"step {first.step}): are all ranks calling dumper.step()?"
    )


def _uneven_calls(present: list["Peer"]) -> str | None:
    if time.monotonic() - max((peer.called for peer in present), default=0.0) < DRIFT_S:
        return None  # the others may be about to make the call
    for method in sorted({name for peer in present for name in peer.calls}):
        counts = {peer.rank: peer.calls.get(method, 0) for peer in present}
        if len(set(counts.values())) > 1:
            behind = [rank for rank, count in counts.items() if count < max(counts.values())]
            return f"{ranks_text(behind)} called {method}() less often than the others: do all ranks call it?"
    return None


def _hopeless(roll: "Roll") -> str | None:
    """A rule of the first configuration that no rank of a complete job matches."""
    peers = list(roll.peers.values())
    if len(peers) < roll.world_size:
        return None
    rules = set.intersection(*(set(peer.unmatched) for peer in peers)) if peers else set()
    return peers[0].unmatched[min(rules)] + " on any rank" if rules else None
