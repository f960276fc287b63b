"""KV cache quantization of a checkpoint: whether it requests FP8, and the scales of each layer's keys and values.

Supported formats: `kv_cache_scheme` of compressed-tensors, ModelOpt and AutoFP8, and `kv_cache_quant_algo` of ModelOpt,
in config.json or hf_quant_config.json. The scales are scalar tensors below `model.layers.N.self_attn`. In multimodal
checkpoints they are below `model.language_model.layers.N.self_attn` or `language_model.model.layers.N.self_attn`.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapscope.core.errors import CheckpointError
from tapscope.core.formatting import short
from tapscope.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tapscope.engine.checkpoint.quantization import sections
from tapscope.engine.checkpoint.received_weights import WeightSource
from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.kv_cache.cache_layout import CacheLayout
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.kv_format import KV_DTYPES
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.params.validators import is_number

_log = logging.getLogger(__name__)
_DECODERS = ("model.", "model.language_model.", "language_model.model.")
_KEY = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_VALUE = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")

LayerScales = tuple[float | None, float | None]
"""Scales of a layer's keys and values; None for a scale that the checkpoint lacks or that the layer does not need."""


def resolve_kv_dtype(config: EngineConfig, computed: str) -> str:
    """Return the name of the cache's storage dtype, a key of KV_DTYPES.

    ``auto`` selects the checkpoint's KV dtype, or ``computed``, the model's dtype, if the checkpoint has no KV dtype.
    Raises CheckpointError if the checkpoint's KV dtype is not supported.
    """
    if config.kv_cache_dtype == "auto":
        return _checkpoint_kv_dtype(Path(config.model)) or computed
    return "fp8_e4m3" if config.kv_cache_dtype == "fp8" else config.kv_cache_dtype


def read_scales(folder: WeightSource, layouts: Mapping[int, CacheLayout], *, partial: bool) -> dict[int, LayerScales]:
    """Read the scales of each layer of ``layouts``; empty if ``folder`` has no scales.

    With ``partial``, some layers may lack scales. Raises CheckpointError for a scale that is not a finite number above
    0, for missing scales, and for two different scales of one tensor.
    """
    with open_checkpoint(folder) as checkpoint:
        decoder = _decoder(checkpoint)
        paths = {layer: f"{decoder}layers.{layer}.self_attn." for layer in layouts}
        by_layer = {layer: _of_layer(checkpoint, paths[layer], layout) for layer, layout in layouts.items()}
        missing = [
            f"{paths[layer]}{'k_scale' if key is None else 'v_scale'}"
            for layer, (key, value) in by_layer.items()
            if not _is_complete(key, value, layouts[layer])
        ]
        if partial:
            return {layer: scales for layer, scales in by_layer.items() if scales != (None, None)}
        if any(scales != (None, None) for scales in by_layer.values()) and missing:
            raise CheckpointError(f"{folder} has KV cache scales, but not {missing[0]}; all layers need them")
        return {} if missing else by_layer


def use_scales(cache: KVCache, scales: Mapping[int, LayerScales], *, partial: bool) -> None:
    """Set the scales from :func:`read_scales`; other layers are reset to 1, or with ``partial`` keep their scales."""
    for layer in cache.layers:
        cache.set_scales(layer, *scales.get(layer, (None, None) if partial else (1.0, 1.0)))


def warn_of_scales(folder: WeightSource, kv_dtype: str, scales: Mapping[int, LayerScales], *, is_asked: bool) -> None:
    """Log a warning if an e4m3 cache has no scales, or if scales are unused and the user did not choose the dtype."""
    if kv_dtype == "fp8_e4m3" and not scales:
        _log.warning(
            "%s has no scales for an FP8 KV cache, so 1.0 is used, and keys and values beyond 448 are clamped. To "
            "avoid this, use a checkpoint with k_scale and v_scale in each layer (from llm-compressor or ModelOpt), a "
            "file of scales (quantization_param_path), kv_cache_dtype='fp8_e5m2' (range 57344), or 'bfloat16'",
            folder,
        )
    if kv_dtype in ("fp8_e4m3", "fp8_e5m2") or is_asked:
        return
    with open_checkpoint(folder) as checkpoint:
        unused = checkpoint.cache_scales
    if unused:
        _log.warning(
            "%s: %d scales of an FP8 KV cache, such as %s, are ignored because its config does not request FP8. "
            "Set kv_cache_dtype='fp8' to use them, or kv_cache_dtype=%r to silence this warning",
            folder, len(unused), unused[0], kv_dtype,
        )  # fmt: skip


def _checkpoint_kv_dtype(folder: Path) -> str | None:
    """Return ``fp8_e4m3`` if config.json or hf_quant_config.json requests it; None without a KV cache scheme."""
    for path, values in sections(folder):
        for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
            value = values.get(name)
            if value is None:
                continue
            if not _is_fp8(value):
                raise CheckpointError(
                    f"{path}: {name} is {value!r}; supported: FP8 with one static scale per tensor. To override it, "
                    f"set kv_cache_dtype to one of {', '.join(KV_DTYPES)}"
                )
            return "fp8_e4m3"
    return None


def _is_fp8(value: Any) -> bool:
    """Return whether a scheme is FP8: ModelOpt writes ``FP8``, AutoFP8 ``static``, compressed-tensors an object."""
    if not isinstance(value, dict):
        return value in ("FP8", "static")
    wanted = {"num_bits": (8,), "type": ("float",), "strategy": ("tensor", None), "dynamic": (False, None)}
    return all(value.get(name) in choices for name, choices in wanted.items())


def _decoder(checkpoint: Checkpoint) -> str:
    """Return the prefix of the decoder's tensors, derived from the names of the scales."""
    prefixes = (each for each in _DECODERS if any(n.startswith(f"{each}layers.") for n in checkpoint.cache_scales))
    return next(prefixes, _DECODERS[0])


def _of_layer(checkpoint: Checkpoint, prefix: str, layout: CacheLayout) -> LayerScales:
    key = _one(checkpoint, [prefix + name for name in _KEY])
    return key, _one(checkpoint, [prefix + name for name in _VALUE]) if layout.value_dim else None


def _one(checkpoint: Checkpoint, names: list[str]) -> float | None:
    """Return the scale stored under one of ``names``; several names are allowed if their values are equal."""
    scales = {name: checkpoint.number(name) for name in names if name in checkpoint.cache_scales}
    for name, scale in scales.items():
        where = f"{name} in {checkpoint.file_of(name)}"
        if not (math.isfinite(scale) and scale > 0):
            raise CheckpointError(f"{where} is {scale}; a KV cache scale must be a finite number above 0")
        first = next(iter(scales))
        if scale != scales[first]:
            raise CheckpointError(f"{where} is {scale}, but {first}, which scales the same values, is {scales[first]}")
    return next(iter(scales.values()), None)


def _is_complete(key: float | None, value: float | None, layout: CacheLayout) -> bool:
    return key is not None and (value is not None or not layout.value_dim)


def read_scale_file(path: Path, layers: Sequence[int], rank: int, tp: int) -> dict[int, tuple[float, float]]:
    """Read each layer's key and value scales on ``rank`` of ``tp``, from a file for SGLang's `quantization-param-path`.

        {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02, "1": 0.03}}}}

    `scaling_factor` maps each tensor-parallel rank (or "0" for all ranks) and layer to the common scale of its keys and
    values (https://docs.sglang.ai, "Quantized KV Cache"). Raises CheckpointError naming the file, rank and layer at
    fault.
    """
    if not path.is_file():
        raise CheckpointError(f"quantization_param_path {path} is not a file")
    section = ConfigReader.open(path).section("kv_cache")
    by_rank = None if section is None else section.section("scaling_factor")
    if section is None or by_rank is None:
        raise CheckpointError(f"{path} has no kv_cache.scaling_factor, which maps ranks and layers to scales")
    section.choice("dtype", ("float8_e4m3fn", "fp8", "fp8_e4m3"), "float8_e4m3fn")
    ranks = sorted(by_rank.values)
    if ranks not in (["0"], sorted(map(str, range(tp)))):
        raise CheckpointError(
            f"{path}: scaling_factor is for ranks {', '.join(ranks)}; it must be for 0, or 0 to {tp - 1}"
        )
    name = str(rank) if len(ranks) > 1 else "0"
    scales = by_rank.section(name)
    wanted = [str(layer) for layer in layers]
    if scales is None or set(scales.values) != set(wanted):
        raise CheckpointError(
            f"{path}: scaling_factor of rank {name} must have layers {_spelled(layers)}, and only these"
        )
    for layer in wanted:
        scale = scales.values[layer]
        if not is_number(scale) or scale <= 0:
            problem = f"{path}: the scale of rank {name}, layer {layer} is {short(scale)}"
            raise CheckpointError(f"{problem}; it must be a finite number above 0")
    return {int(layer): (float(scales.values[layer]),) * 2 for layer in wanted}


def _spelled(layers: Sequence[int]) -> str:
    """Return ``0 to 3`` for consecutive layers, otherwise a list, because some layers cache no keys."""
    if list(layers) == list(range(len(layers))):
        return f"0 to {len(layers) - 1}"
    return ", ".join(map(str, layers))
