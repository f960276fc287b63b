"""Caches: what keys and values that are kept in a narrower format than they were made in make of errors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

_FORMATS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""As vLLM, SGLang and the engine call them."""
_SHARE = 0.72 * math.sqrt(2.0 / math.pi)
"""A step beside its epsilon (see :mod:`.floor`), and the mean size of a normal error beside its root mean square."""


def cache_epsilon(manifests: Sequence[Mapping[str, Any]]) -> float:
    """Of the format in which both runs say that they keep their caches; 0 where that is not one format, or neither run
    computes in a finer one."""
    dtype = [str(each.get("dtype", "")) for each in manifests]
    kept = [str(each.get("kv_cache_dtype", "")) for each in manifests]
    formats = {_FORMATS.get(k, own if k in ("", "auto") else k) for k, own in zip(kept, dtype, strict=True)}
    (name, *others) = formats
    if others or not all(map(dtypes.is_float, (name, *dtype))):
        return 0.0
    found = dtypes.epsilon(name)
    return found if found > min(map(dtypes.epsilon, dtype)) else 0.0


def twice_rounded(errors: Array, epsilon: float) -> Array:
    """Errors of values once both runs have rounded them to one format.

    Two values that are d apart fall to both sides of a boundary between two numbers that are s apart with probability
    d / s, and are then s apart: the mean square is s times the mean of d, which is far more than that of d.
    """
    found: Array = np.sqrt(errors**2 + _SHARE * epsilon * errors)
    return found
