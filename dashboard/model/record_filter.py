"""Filter of records, such as ``is:nonfinite max:>100 dtype:fp8``."""

import math
from typing import Any

import numpy as np

from tapscope.core.site import layer_of, module_of
from tapscope.dashboard.model.filter import ChoiceField, Field, NumberField, dtype_names, matching
from tapscope.render.anomalies import anomalous_places
from tapscope.run_format.records import Records

Array = np.ndarray[Any, Any]


def matching_records(records: Records, text: str) -> Array | bool:
    """Return [records] bool: whether each record matches a filter, see :mod:`.model.filter`. Raises ConfigError."""

    def marked(name: str) -> Array:
        nonfinite: Array = records.nonfinite > 0
        if name != "anomaly":
            return nonfinite if name == "nonfinite" else (records.absmax == 0.0) & ~nonfinite
        is_match = np.zeros(len(records), bool)
        is_match[anomalous_places(records)[0]] = True
        return is_match

    fields: dict[str, Field] = {
        "is": ChoiceField(marked, ("anomaly", "nonfinite", "zeros")),
        "max": NumberField(lambda: records.absmax),
        "rms": NumberField(lambda: records.rms),
        "layer": NumberField(lambda: records.of_sites(_layer, float)),
        "dtype": ChoiceField(lambda name: records.of_kinds(lambda kind: name in dtype_names(kind.dtype)).astype(bool)),
    }
    return matching(text, records.of_sites, fields)


def _layer(site: str) -> float:
    number = layer_of(module_of(site))
    return math.nan if number is None else number
