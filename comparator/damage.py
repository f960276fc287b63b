"""Damage: records whose bytes are gone or are not those that were recorded; the rest of the runs is compared."""

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct, field, structs

from tapscope.comparator.coverage import Coverage
from tapscope.comparator.examined import Examined
from tapscope.comparator.localise import Divergence
from tapscope.comparator.series import Series, recorded
from tapscope.errors import DataError, RunCorruptError
from tapscope.kernels.native import summarize_array
from tapscope.manifest import HASH_VERSION
from tapscope.record import Key, Record
from tapscope.run import Run
from tapscope.text import plural


class Damage(Struct):
    """What is damaged in one run. A firing goes as a whole: what its other ranks hold is no tensor without the rest."""

    run: Run
    reasons: dict[Key, str] = field(default_factory=dict)
    """Firing, with rank 0 for all ranks -> what is wrong with the first damaged record of it."""
    num_records: int = 0
    """Records left out, those of other ranks included."""
    _compared: list[Record] = field(default_factory=list)

    def sound(self, records: Sequence[Record]) -> list[Record]:
        """Without the firings that are damaged; raises RunCorruptError when none is left.

        Here only what need not be read is looked at: whether the bytes are there.
        """
        for record in records:
            if record.entry is not None and (reason := self.run.lacks(record)):
                self.reasons.setdefault(_firing(record), reason)
        kept = [record for record in records if _firing(record) not in self.reasons] if self.reasons else list(records)
        self.num_records, self._compared = len(records) - len(kept), kept
        if not self.reasons:
            return kept
        if not kept:
            raise RunCorruptError(f"{self.run.path}: not one value of what is to be compared is whole: {self._first()}")
        return kept

    def look(self, suspects: Iterable[Series]) -> bool:
        """Read the values of ``suspects`` and check them; whether some are not what was recorded.

        Where one is not, every record that is compared is read: damage seldom comes alone.
        """
        if self.run.hash_version != HASH_VERSION:
            return False
        before = len(self.reasons)
        for series in suspects:
            for source in recorded(series):
                for firing in source.firings:
                    for record in firing.records:
                        self._check(record)
        if len(self.reasons) == before:
            return False
        for record in self._compared:
            self._check(record)
        return True

    def _check(self, record: Record) -> None:
        if record.entry is None or record.hash is None:
            return
        try:
            found = summarize_array(np.ascontiguousarray(self.run.array(record))).hash
        except DataError as error:
            self.reasons.setdefault(_firing(record), str(error))
            return
        if found != record.hash:
            key = record.key
            reason = (
                f"{record.entry.file} of rank {key.rank}: the bytes of {key.site} at step {key.step} are not those "
                "that were recorded"
            )
            self.reasons.setdefault(_firing(record), reason)

    def sentences(self) -> list[str]:
        """What is damaged, in one sentence; none when nothing is."""
        if not self.reasons:
            lost = self.run.damaged
            return [f"{self.run.name} is damaged, {plural(len(lost), 'file')} left out: {lost[0]}"] if lost else []
        left_out = f"{plural(self.num_records, 'record')} left out"
        return [f"{self.run.name} is damaged, {left_out} (tapscope verify {self.run.path} lists them): {self._first()}"]

    def _first(self) -> str:
        return next(iter(self.reasons.values()))


def look(damage: tuple[Damage, Damage], divergences: Sequence[Divergence], examined: Sequence[Examined]) -> bool:
    """Check the values of every culprit; whether one of them is damage and no doing of a module."""
    sites = {divergence.finding.site for divergence in divergences}
    pairs = [one.pair for one in examined if one.site in sites]
    sides = [p.baseline for p in pairs if p.baseline], [p.target for p in pairs if p.target]
    found = [one.look(series) for one, series in zip(damage, sides, strict=True)]
    return any(found)


def with_damage(coverage: Coverage, damage: tuple[Damage, Damage]) -> Coverage:
    """The account, with what was left out."""
    said = tuple(sentence for one in damage for sentence in one.sentences())
    return structs.replace(coverage, damaged=said, partial=(*said, *coverage.partial)) if said else coverage


def _firing(record: Record) -> Key:
    return record.key._replace(rank=0)
