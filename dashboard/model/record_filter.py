"""Record filter: what ``is:nonfinite max:>100 dtype:fp8`` means for records."""

import math
from collections.abc import Callable, Iterable

from tapscope.core.site import layer_of
from tapscope.dashboard.model.filter import ChoiceField, Field, NumberField, dtype_names, parse_filter, site_test
from tapscope.render.anomalies import anomalous_places
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records


def record_filter(records: Records, text: str) -> Callable[[int], bool]:
    """Which places in ``records`` match a filter, see :mod:`.model.filter`; raises ConfigError."""
    sites = records.sites
    words = text.split()
    if len(words) == 1 and ":" not in text and not text.startswith("-"):
        found = site_test(text)
        return lambda place: found(sites[place])
    absmax, nonfinite = records.absmax, records.nonfinite
    anomalous = frozenset(anomalous_places(records)[0].tolist()) if "is:" in text else frozenset[int]()

    def marks(place: int) -> Iterable[str]:
        bad, zero = bool(nonfinite[place]), bool(absmax[place] == 0.0)
        return [
            name
            for name, holds in (("anomaly", place in anomalous), ("nonfinite", bad), ("zeros", zero and not bad))
            if holds
        ]

    def layer(place: int) -> float:
        number = layer_of(sites[place].rpartition(":")[0])
        return math.nan if number is None else number

    fields: dict[str, Field[int]] = {
        "is": ChoiceField(marks, ("anomaly", "nonfinite", "zeros")),
        "max": NumberField(lambda place: float(absmax[place])),
        "rms": NumberField(lambda place: _rms(records[place])),
        "layer": NumberField(layer),
        "dtype": ChoiceField(lambda place: dtype_names(records.kind_at(place).dtype)),
    }
    return parse_filter(text, lambda place: (sites[place],), fields)


def _rms(record: Record) -> float:
    found = record.stats.rms if record.stats else None
    return math.nan if found is None else found
