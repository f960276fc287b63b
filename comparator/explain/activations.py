"""Activations: the target applies another function to the same input (GELU: Hendrycks and Gimpel, arXiv 1606.08415)."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tapscope.comparator.explain.damage import Damage
from tapscope.comparator.explain.relatives import Relative
from tapscope.comparator.explain.trial import Trial

Array = np.ndarray[Any, Any]

_erf = np.vectorize(math.erf, otypes=[float])


def _sigmoid(x: Array) -> Array:
    found: Array = 1.0 / (1.0 + np.exp(-x))
    return found


def _gelu_tanh(x: Array) -> Array:
    found: Array = 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return found


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "gelu (tanh)": _gelu_tanh,
    "gelu (quick)": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0.0),
    "relu squared": lambda x: np.maximum(x, 0.0) ** 2,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}


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
                yield Trial("activation", f"target = {name} of its input, baseline = {own}", values)
