"""KV cache: the effect of storing keys and values in a narrower format on their errors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tapscope.comparator.metrics.elementwise import hypot
from tapscope.comparator.metrics.error_columns import ELEMENT, PEAK
from tapscope.comparator.noise_floor.constants import KV_CACHE_STEP_SHARE
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.core import dtypes
from tapscope.core.formatting import number

Array = np.ndarray[Any, Any]

_FORMATS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Names of formats in vLLM, SGLang and the engine -> dtypes."""


def kv_cache_epsilon(manifests: Sequence[Mapping[str, Any]]) -> float:
    """Return the epsilon of the format in which both runs store their KV caches.

    Returns 0 if the formats differ, or if the format is not coarser than the dtypes of the runs.
    """
    dtype = [str(each.get("dtype", "")) for each in manifests]
    kept = [str(each.get("kv_cache_dtype", "")) for each in manifests]
    formats = {_FORMATS.get(k, own if k in ("", "auto") else k) for k, own in zip(kept, dtype, strict=True)}
    (name, *others) = formats
    if others or not all(map(dtypes.is_float, (name, *dtype))):
        return 0.0
    epsilon = dtypes.epsilon(name)
    return epsilon if epsilon > min(map(dtypes.epsilon, dtype)) else 0.0


def stored_error(errors: Array, epsilon: float) -> Array:
    """Return the errors of values after both runs rounded them to one format.

    Two values at distance d round to different numbers, s apart, with probability d / s. The mean square error is
    therefore s times the mean of d, much more than the mean square of d.
    """
    stored: Array = np.sqrt(errors**2 + KV_CACHE_STEP_SHARE * epsilon * errors)
    return stored


class KVCacheRounding(Effect[float]):
    """Storage of keys and values in a narrower cache format in both runs: an error d becomes ``sqrt(d^2 + 0.57 eps
    d)``."""

    name = "kv_cache_rounding"

    def find(self) -> Mapping[int, float]:
        """Compute node of an attention's weighted mean -> epsilon of the cache."""
        epsilon = self.inputs.facts.kv_cache_epsilon
        if not epsilon:
            return {}
        return {node: epsilon for node in self.inputs.nodes if self.inputs.attention.is_mean(node)}

    def apply(self, given: Array) -> Array:
        """Return the errors of the inputs, [kinds, cases], after storage in the cache."""
        at = [self.inputs.case_of[node] for node in self.values]
        if not at:
            return given
        given, epsilon = given.copy(), self.inputs.facts.kv_cache_epsilon
        given[: ELEMENT + 1, at] = stored_error(given[: ELEMENT + 1, at], epsilon)
        given[PEAK, at] = hypot(given[PEAK, at], np.where(given[PEAK, at] > 0.0, epsilon, 0.0))
        return given

    def stored(self, node: int, error: float) -> float:
        """Return an error upstream of a node after storage in the cache."""
        return float(stored_error(np.array(error), self.values[node])) if node in self.values else error

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return f"both runs store keys and values in a format of epsilon {number(self.values[node])}"
