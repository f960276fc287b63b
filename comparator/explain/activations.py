"""Activations: the target applies a different function to the same input (:mod:`..detectors.activation_functions`)."""

from collections.abc import Iterable, Iterator

import numpy as np

from tapscope.comparator.detectors.activation_functions import FUNCTIONS
from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import Hypothesis
from tapscope.comparator.explain.related_sites import RelatedSite


def activations(region: ErrorRegion, others: Iterable[RelatedSite]) -> Iterator[Hypothesis]:
    """Yield every other known function of the input, if the baseline is a known function of that input."""
    for one in others:
        if not one.is_input or not np.isfinite(one.values).all():
            continue
        x = region.cut(one.values)
        made = {name: function(x) for name, function in FUNCTIONS.items()}
        size = float((region.before**2).sum())
        off = {name: float(((values - region.before) ** 2).sum()) for name, values in made.items()}
        own = min(off, key=lambda name: off[name])
        # Accept the nearest function only if it is nearer than the target: GELU has several close approximations.
        if not off[own] < max(4.0 * region.noise**2 * size, 0.05 * float(((region.after - region.before) ** 2).sum())):
            continue
        for name, values in made.items():
            if name != own:
                tolerance = 2.0 * region.noise * float(np.sqrt((values**2).sum()))
                equivalent = [
                    n for n, v in made.items() if n == name or float(np.sqrt(((v - values) ** 2).sum())) < tolerance
                ]
                if own not in equivalent:
                    yield Hypothesis(
                        "activation", f"target = {' or '.join(equivalent)} of its input, baseline = {own}", values
                    )
