"""Determinism: check by hashes whether two runs of the same steps are bit-equal."""

from collections.abc import Iterator

from msgspec import Struct

from tapscope.core.errors import DataError
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run

__all__ = ["Unequal", "compare_bits"]

TOKENS = "tokens"
"""Pseudo-site for a step in which the two runs compute different tokens."""


class Unequal(Struct, frozen=True, kw_only=True):
    """A value that differs between two runs."""

    site: str
    """The site; ``tokens`` for the token ids of the step."""
    step: int
    rank: int
    reason: str
    """``bits``, ``dtype``, ``shape``, ``slice``, ``value`` (for a non-tensor), ``tokens``, ``only_first`` or
    ``only_second``."""
    occurrence: int = 0
    micro: int = 0
    pass_: str = "forward"

    def __str__(self) -> str:
        parts = [f"step {self.step}, rank {self.rank}"]
        parts += [f"microbatch {self.micro}"] if self.micro else []
        parts += [f"{self.pass_} pass"] if self.pass_ != "forward" else []
        parts += [f"call {self.occurrence}"] if self.occurrence else []
        return f"{self.site} ({', '.join(parts)}): {_WORDS[self.reason]}"


_WORDS = {
    "bits": "its bits differ",
    "dtype": "its dtype differs",
    "shape": "its shape differs",
    "slice": "another part of it was recorded",
    "value": "its value differs",
    "tokens": "the runs compute other tokens",
    "only_first": "only the first run has it",
    "only_second": "only the second run has it",
}


def compare_bits(first: Run, second: Run) -> list[Unequal]:
    """Return the records that are not bit-equal in two runs of the same steps.

    They are ordered by step, then rank, then as in the first run.

    ::

        with open_run("reference") as first, open_run("target") as second:
            for unequal in compare_bits(first, second):
                print(unequal)

    Values are compared by their 128-bit hashes, so the capture level ``stats`` suffices: ``-0.0`` differs from ``0.0``,
    and a NaN equals itself. Raises DataError for a run without records, with missing data or without hashes.
    """
    for run in (first, second):
        account = run.ledger()
        if not account.complete or not run.records:
            raise DataError(f"{run.path} is incomplete: {(account.sentences() or ['no records'])[0]}")
    if first.hash_version != second.hash_version:
        raise DataError(f"{first.path} and {second.path} have hashes of different versions; record both again")
    return list(_unequal(first, second))


def _unequal(first: Run, second: Run) -> Iterator[Unequal]:
    ours, theirs = ({record.key: record for record in run.records} for run in (first, second))
    steps = {(step, rank) for run in (first, second) for step, ranks in run.steps.items() for rank in ranks}
    places = [
        ((step, rank, -1), Unequal(site=TOKENS, step=step, rank=rank, reason="tokens"))
        for step, rank in steps
        if _tokens(first, rank, step) != _tokens(second, rank, step)
    ]
    for key in dict.fromkeys([*ours, *theirs]):
        one, two = ours.get(key), theirs.get(key)
        if (reason := _difference(one, two)) is not None:
            place = Unequal(
                site=key.site, step=key.step, rank=key.rank, reason=reason, occurrence=key.occurrence, micro=key.micro,
                pass_=key.pass_,
            )  # fmt: skip
            seq = (one or two).seq  # type: ignore[union-attr]
            places.append(((key.step, key.rank, seq), place))
    for _, place in sorted(places, key=lambda each: each[0]):
        yield place


def _tokens(run: Run, rank: int, step: int) -> list[int] | None:
    line = run.steps.get(step, {}).get(rank)
    return None if line is None else list(line.info.token_ids)


def _difference(one: Record | None, two: Record | None) -> str | None:
    if one is None or two is None:
        return "only_second" if one is None else "only_first"
    for name in ("dtype", "shape", "slice", "value"):
        if getattr(one, name) != getattr(two, name):
            return name
    if one.dtype is None:
        return None
    if one.hash is None or two.hash is None:
        raise DataError(f"{one.key.site} was recorded without a hash; only recordings with hashes can be compared")
    return None if one.hash == two.hash else "bits"
