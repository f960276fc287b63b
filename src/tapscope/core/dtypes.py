"""Names, widths and NumPy dtypes of tensor elements, including bf16 and fp8 (through ml_dtypes)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tapscope.core.errors import RunCorruptError

if TYPE_CHECKING:
    import numpy as np

# name (as torch spells it) -> (bytes of one element, safetensors name)
_TABLE: dict[str, tuple[int, str]] = {
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint64": (8, "U64"),
    "uint32": (4, "U32"),
    "uint16": (2, "U16"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
    "complex64": (8, "C64"),
    "complex128": (16, "F64"),  # not in safetensors: stored as pairs, see safetensors_form
}

NAMES: tuple[str, ...] = tuple(_TABLE)
"""Every dtype a record may have, in torch's spelling."""

OF_SAFETENSORS = {tag: name for name, (_, tag) in _TABLE.items() if name != "complex128"}
"""safetensors dtype name -> dtype."""

COMPLEX = {"complex64": "float32", "complex128": "float64"}
"""Complex dtype -> dtype of its real and imaginary parts."""

_SHORT = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4",
    "float8_e5m2": "fp8e5",
    "float8_e4m3fnuz": "fp8e4nuz",
    "float8_e5m2fnuz": "fp8e5nuz",
    "float8_e8m0fnu": "fp8e8",
}

_EPSILON = {
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "complex64": 2.0**-23,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-2,
    "float8_e8m0fnu": 1.0,
}


@lru_cache
def smallest(name: str) -> float:
    """Return the smallest positive value of a floating-point dtype, including subnormals; 0 for other dtypes."""
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(name)).smallest_subnormal) if is_float(name) else 0.0


@lru_cache
def numpy_dtype(name: str) -> "np.dtype[Any]":
    """Return the NumPy dtype called ``name``; raises RunCorruptError for an unknown name."""
    import ml_dtypes  # imported lazily: the recorder must start quickly and needs no arrays
    import numpy as np

    _lookup(name)
    return np.dtype(getattr(ml_dtypes, name, name))


def _lookup(name: str) -> tuple[int, str]:
    try:
        return _TABLE[name]
    except KeyError:
        raise RunCorruptError(f"unknown dtype {name!r}; known: {', '.join(NAMES)}") from None


def itemsize(name: str) -> int:
    """Return the number of bytes per element."""
    return _lookup(name)[0]


def to_safetensors(name: str) -> str:
    """Return the dtype name used in safetensors files: ``bfloat16`` -> ``BF16``; ``complex128`` is a pair of
    ``F64``."""
    return _lookup(name)[1]


def safetensors_form(name: str, shape: Sequence[int]) -> tuple[str, Sequence[int]]:
    """Return the dtype name and shape used in safetensors files; complex128 gets a last axis of size 2 for its two
    parts."""
    return to_safetensors(name), [*shape, 2] if name == "complex128" else shape


def short(name: str | None) -> str:
    """Return a short dtype name for display: ``bfloat16`` -> ``bf16``; integer dtypes are unchanged."""
    return _SHORT.get(name or "", name or "-")


def is_float(name: str | None) -> bool:
    """Return whether arithmetic in this dtype rounds."""
    return name in _EPSILON


def epsilon(name: str) -> float:
    """Return the machine epsilon, the distance from 1 to the next larger number; 0 for dtypes that do not round."""
    return _EPSILON.get(name, 0.0)
