"""What a checkpoint says of its KV cache: whether it is to be FP8, and the scales of each layer's keys and values.

The formats: `kv_cache_scheme` of compressed-tensors, ModelOpt and AutoFP8, and `kv_cache_quant_algo` of ModelOpt, in
config.json or hf_quant_config.json; the scales are tensors of one number each below `model.layers.N.self_attn`.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tapscope.engine.checkpoint.quantization import sections
from tapscope.engine.kv_cache.cache_layout import CacheLayout
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.kv_format import KV_DTYPES
from tapscope.engine.params.engine_config import EngineConfig

_log = logging.getLogger(__name__)
_KEY = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_VALUE = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")

LayerScales = tuple[float | None, float | None]
"""Of a layer's keys and values; None where nothing is said, or nothing is cached."""


def resolve_kv_dtype(config: EngineConfig, computed: str) -> str:
    """The name in KV_DTYPES that the cache is stored in; raises CheckpointError where ``auto`` meets what is not one.

    ``auto`` is what the checkpoint asks for, else ``computed``, the type of the model.
    """
    if config.kv_cache_dtype == "auto":
        return _asked(Path(config.model)) or computed
    return "fp8_e4m3" if config.kv_cache_dtype == "fp8" else config.kv_cache_dtype


def read_scales(folder: Path, layout: CacheLayout, *, partial: bool) -> dict[int, LayerScales]:
    """The scales of each layer; empty when ``folder`` has none. With ``partial`` it may have any.

    Raises CheckpointError for a scale that is no number above 0, for some but not all of them, and for two that
    contradict each other.
    """
    with open_checkpoint(folder) as checkpoint:
        found = {layer: _of_layer(checkpoint, layer, layout) for layer in range(layout.num_layers)}
        missing = [_missing(layer, key) for layer, (key, value) in found.items() if not _whole(key, value, layout)]
        if partial:
            return {layer: scales for layer, scales in found.items() if scales != (None, None)}
        if any(scales != (None, None) for scales in found.values()) and missing:
            raise CheckpointError(f"{folder} has scales of its KV cache, but not {missing[0]}; all layers need them")
        return {} if missing else found


def use_scales(cache: KVCache, scales: Mapping[int, LayerScales], *, partial: bool) -> None:
    """Enter what :func:`read_scales` found; what it did not find is 1, or with ``partial`` stays as it was."""
    for layer in range(cache.layout.num_layers):
        cache.set_scales(layer, *scales.get(layer, (None, None) if partial else (1.0, 1.0)))


def warn_of_scales(folder: Path, kv_dtype: str, scales: Mapping[int, LayerScales], *, is_asked: bool) -> None:
    """Say that scales are missing where values would need them, or there and not used though nobody ``is_asked`` so."""
    if kv_dtype == "fp8_e4m3" and not scales:
        _log.warning(
            "%s has no scales for an FP8 KV cache: 1.0 is used, and keys and values beyond 448 are cut off. Better: a "
            "checkpoint with k_scale and v_scale in each layer, as llm-compressor and ModelOpt calibrate, or a file "
            "of scales (quantization_param_path); kv_cache_dtype='fp8_e5m2', which reaches to 57344; or 'bfloat16'",
            folder,
        )
    if kv_dtype in ("fp8_e4m3", "fp8_e5m2") or is_asked:
        return
    with open_checkpoint(folder) as checkpoint:
        unused = checkpoint.cache_scales
    if unused:
        _log.warning(
            "%s: %d scales of an FP8 KV cache, such as %s, are not used: its config asks for none. "
            "kv_cache_dtype='fp8' uses them, kv_cache_dtype=%r does without",
            folder, len(unused), unused[0], kv_dtype,
        )  # fmt: skip


def _asked(folder: Path) -> str | None:
    """``fp8_e4m3`` where config.json or hf_quant_config.json asks for it, None where neither says anything."""
    for path, values in sections(folder):
        for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
            value = values.get(name)
            if value is None:
                continue
            if not _is_fp8(value):
                raise CheckpointError(
                    f"{path}: {name} is {value!r}; supported: FP8 with one constant scale a tensor. To do without, set "
                    f"kv_cache_dtype to one of {', '.join(KV_DTYPES)}"
                )
            return "fp8_e4m3"
    return None


def _is_fp8(value: Any) -> bool:
    """ModelOpt says ``FP8``, AutoFP8 ``static``, compressed-tensors an object."""
    if not isinstance(value, dict):
        return value in ("FP8", "static")
    wanted = {"num_bits": (8,), "type": ("float",), "strategy": ("tensor", None), "dynamic": (False, None)}
    return all(value.get(name) in choices for name, choices in wanted.items())


def _of_layer(checkpoint: Checkpoint, layer: int, layout: CacheLayout) -> LayerScales:
    prefix = f"model.layers.{layer}.self_attn."
    key = _one(checkpoint, [prefix + name for name in _KEY])
    return key, _one(checkpoint, [prefix + name for name in _VALUE]) if layout.value_dim else None


def _one(checkpoint: Checkpoint, names: list[str]) -> float | None:
    """The scale that goes by one of ``names``, or by several that agree."""
    found = {name: checkpoint.number(name) for name in names if name in checkpoint.cache_scales}
    for name, scale in found.items():
        where = f"{name} in {checkpoint.file_of(name)}"
        if not (math.isfinite(scale) and scale > 0):
            raise CheckpointError(f"{where} is {scale}; a scale of the KV cache must be a finite number above 0")
        first = next(iter(found))
        if scale != found[first]:
            raise CheckpointError(f"{where} is {scale}, but {first}, of the same values, is {found[first]}")
    return next(iter(found.values()), None)


def _whole(key: float | None, value: float | None, layout: CacheLayout) -> bool:
    return key is not None and (value is not None or not layout.value_dim)


def _missing(layer: int, key: float | None) -> str:
    return f"model.layers.{layer}.self_attn.{'k_scale' if key is None else 'v_scale'}"
