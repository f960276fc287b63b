"""Norm weights: the target's norm uses the weight of another norm of the model."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import Hypothesis
from tapscope.comparator.explain.recorded_attention import SiteReader
from tapscope.comparator.explain.token_slots import TokenSlots
from tapscope.core.site import module_of

Array = np.ndarray[Any, Any]

MAX_NORMS = 256
"""Maximum number of norms whose weights are derived."""
MAX_SCATTER = 0.02
"""Maximum relative scatter of a channel's weight over rows; with more, the module is not an RMS norm."""
_INPUTS = ("in[hidden_states]", "in[x]", "in[input]")


def other_weights(region: ErrorRegion, sites: SiteReader) -> Iterator[Hypothesis]:
    """Yield the baseline with the weight of each other norm of equal width; weights are derived from inputs and
    outputs."""
    path, _, port = region.sample.site.rpartition(":")
    if "norm" not in path.rpartition(".")[2] or not port.startswith("out") or not region.is_everywhere_in_rows:
        return
    own = _weight(path, sites)
    if own is None or len(own) != region.sample.baseline.shape[1] or not np.abs(own).min() > 0.0:
        return
    for site in list(sites.ending("norm:out"))[:MAX_NORMS]:
        other = module_of(site)
        weight = None if other == path else _weight(other, sites)
        if weight is not None and len(weight) == len(own):
            text = f"target has the weight of {other}, another norm"
            yield Hypothesis("other weight", text, region.before * (weight / own)[region.columns])


def _weight(path: str, sites: SiteReader) -> Array | None:
    """Return the weight [width] of an RMS norm of the baseline; None if it cannot be derived."""
    out = sites.slots(f"{path}:out")
    given = next((slots for port in _INPUTS if (slots := sites.slots(f"{path}:{port}")) is not None), None)
    if out is None or given is None or out[0].values.shape != given[0].values.shape:
        return None
    return weight_of(given[0], out[0])


def weight_of(given: TokenSlots, out: TokenSlots) -> Array | None:
    """Return the factor of every channel of the normalized input, as [width]; None if the rows disagree."""
    real = given.pair >= 0
    x, y = given.values[real], out.values[real]
    x = x / np.sqrt(np.maximum((x * x).mean(axis=1, keepdims=True), 1e-300))
    energy = (x * x).sum(axis=0)
    if not len(x) or not energy.min() > 0.0:
        return None
    weight: Array = (x * y).sum(axis=0) / energy
    off = float(((y - x * weight) ** 2).sum()) / max(float((y * y).sum()), 1e-300)
    return weight if off**0.5 < MAX_SCATTER else None
