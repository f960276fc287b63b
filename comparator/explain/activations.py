"""Activations: the target applies another function to the same input (:mod:`..functions`)."""

from collections.abc import Iterable, Iterator

import numpy as np

from tapscope.comparator.detectors.activation_functions import FUNCTIONS
from tapscope.comparator.explain.error_region import Damage
from tapscope.comparator.explain.hypothesis_test import Trial
from tapscope.comparator.explain.related_sites import Relative


def activations(damage: Damage, others: Iterable[Relative]) -> Iterator[Trial]:
    """Every other function, where the baseline is one of these of the module's input."""
    for one in others:
        if not one.is_input or not np.isfinite(one.values).all():
            continue
        x = damage.cut(one.values)
        made = {name: function(x) for name, function in FUNCTIONS.items()}
        size = float((damage.before**2).sum())
        off = {name: float(((values - damage.before) ** 2).sum()) for name, values in made.items()}
        own = min(off, key=lambda name: off[name])
        # The nearest one is meant only if it is nearer than the target is: GELU has look-alikes.
        if not off[own] < max(4.0 * damage.noise**2 * size, 0.05 * float(((damage.after - damage.before) ** 2).sum())):
            continue
        for name, values in made.items():
            if name != own:
                alike = 2.0 * damage.noise * float(np.sqrt((values**2).sum()))
                twins = [n for n, v in made.items() if n == name or float(np.sqrt(((v - values) ** 2).sum())) < alike]
                if own not in twins:
                    yield Trial("activation", f"target = {' or '.join(twins)} of its input, baseline = {own}", values)
