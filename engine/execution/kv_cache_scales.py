"""KVCacheScales: sets the scales of this rank's KV cache, at startup and with new weights."""

from collections.abc import Mapping
from pathlib import Path

from tapscope.engine.checkpoint.received_weights import WeightSource
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.resolved_settings import resolve_scale_file
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.kv_scales import (
    LayerScales,
    read_scale_file,
    read_scales,
    use_scales,
    warn_of_scales,
)
from tapscope.engine.params.engine_config import EngineConfig


class KVCacheScales:
    """Scales from the scale file (``quantization_param_path``) if there is one, otherwise from the checkpoint."""

    def __init__(self, config: EngineConfig, cache: KVCache, kv_dtype: str, tp: TensorParallel) -> None:
        """``kv_dtype``: dtype of the cache. Raises ConfigError for a scale file without an FP8 cache."""
        self._config, self._cache, self._kv_dtype, self._tp = config, cache, kv_dtype, tp
        self._file = resolve_scale_file(config, kv_dtype)

    def load_initial(self) -> None:
        """Set the scales for the configured checkpoint. Raises CheckpointError."""
        config = self._config
        if self._file is None and config.load_format == "dummy":
            return
        folder = Path(config.model)
        scales = self.read(folder, partial=False)
        use_scales(self._cache, scales, partial=False)
        if self._tp.rank == config.dp_rank == 0 and self._file is None:
            warn_of_scales(folder, self._kv_dtype, scales, is_asked=config.kv_cache_dtype != "auto")

    def load(self, source: WeightSource, *, partial: bool) -> None:
        """Set the scales for new weights; with ``partial``, layers without scales in ``source`` keep their scales."""
        scales = self.read(source, partial=partial)
        if self._cache.is_scaled and not partial and not scales and self._tp.rank == 0:
            warn_of_scales(source, self._kv_dtype, scales, is_asked=True)
        use_scales(self._cache, scales, partial=partial)

    def read(self, source: WeightSource, *, partial: bool) -> Mapping[int, LayerScales]:
        """Return the scales that :meth:`load` would set. Raises CheckpointError."""
        layers = sorted(self._cache.layers)
        if self._file is not None:
            return read_scale_file(self._file, layers, self._tp.rank, self._tp.size)
        if not self._cache.kv_format.is_fp8:
            return {}
        return read_scales(source, {layer: self._cache.layout(layer) for layer in layers}, partial=partial)
