"""Activation functions of models by name.

GELU: Hendrycks and Gimpel, arXiv:1606.08415. Hard swish: Howard et al., arXiv:1905.02244.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Function = Callable[[Array], Array]

_STEP = 2.0**-14
"""Half the step of a central difference: rounding in float64 leaves an error of 1e-12, curvature one of 1e-9."""

_erf = np.vectorize(math.erf, otypes=[float])


def _sigmoid(x: Array) -> Array:
    y: Array = 0.5 * (1.0 + np.tanh(0.5 * x))
    return y


def _gelu_tanh(x: Array) -> Array:
    y: Array = 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return y


FUNCTIONS: Mapping[str, Function] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "gelu (tanh)": _gelu_tanh,
    "gelu (quick)": lambda x: x * _sigmoid(1.702 * x),
    "hard swish": lambda x: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0),
    "relu": lambda x: np.maximum(x, 0.0),
    "relu6": lambda x: np.clip(x, 0.0, 6.0),
    "relu squared": lambda x: np.maximum(x, 0.0) ** 2,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}

CLEARING = ("relu", "relu6", "relu squared", "hard swish")
"""Functions that are zero for all small inputs."""


def derivative(function: Function) -> Function:
    """Return the derivative of ``function``, by central differences."""
    return lambda x: (function(x + _STEP) - function(x - _STEP)) / (2.0 * _STEP)
