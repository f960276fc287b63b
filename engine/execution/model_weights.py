"""ModelWeights: loads the weights of one rank's model at startup, and replaces them later."""

import logging
from pathlib import Path

import torch

from tapscope.core.errors import CheckpointError, ConfigError
from tapscope.engine.checkpoint.dummy_weights import fill_with_dummy_weights
from tapscope.engine.checkpoint.quantization import OnlineQuantizer
from tapscope.engine.checkpoint.received_weights import WeightSource
from tapscope.engine.checkpoint.weight_loader import check_weights, default_weight_slices, load_weights
from tapscope.engine.execution.quantized_layers import allocate_linear_weights, load_input_scales, quantized_bytes
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.params.engine_config import EngineConfig

_log = logging.getLogger(__name__)


class ModelWeights:
    """Weights of a model that was created within ``deferred_linear_weights``."""

    def __init__(self, model: CausalLM, config: EngineConfig) -> None:
        self._model, self._config = model, config
        self._tied = dict(model.shared_weights)
        if model.config.tie_word_embeddings:
            self._tied |= model.tied_weights
        skipped = (model.config.num_layers + i for i in range(model.config.num_skipped_layers))
        self._skipped = (*(f"model.layers.{layer}." for layer in skipped), *model.skipped_prefixes)
        self._quantizer = OnlineQuantizer(config.exclude_modules) if config.quantization else None

    def load(self, device: torch.device) -> None:
        """Allocate the weights of linear layers, quantized if they stay quantized, and load all weights.

        Raises CheckpointError, ConfigError.
        """
        config, model, folder = self._config, self._model, Path(self._config.model)
        may_keep = config.load_format != "dummy" and config.quantized_layers != "dequantize"
        allocate_linear_weights(
            model,
            folder if may_keep else None,
            device,
            quantizer=self._quantizer,
            quantizes_inputs=config.quantized_layers == "auto",
        )
        stored, dense = quantized_bytes(model)
        if stored:
            _log.info("weights stay quantized: %.1f MiB, in bf16 %.1f MiB", stored / 2**20, dense / 2**20)
        if config.load_format == "dummy":
            slices = (part for part in default_weight_slices(model) if part.name not in self._tied)
            fill_with_dummy_weights(model.tp.heartbeat.track(slices))
        else:
            self._read(folder, partial=False)

    def check(self, source: WeightSource, *, partial: bool) -> None:
        """Raise the CheckpointError that :meth:`replace` would raise, without changing weights."""
        try:
            check_weights(self._model, source, self._tied, self._skipped, partial=partial, quantizer=self._quantizer)
        except ConfigError as error:  # at startup a setting is at fault, here the checkpoint
            raise CheckpointError(str(error)) from None
        load_input_scales(self._model, source, apply=False)

    def replace(self, source: WeightSource, *, partial: bool) -> None:
        """Replace the weights and static input scales in place; with ``partial`` only those in ``source``."""
        self._read(source, partial=partial)
        load_input_scales(self._model, source)

    def _read(self, source: WeightSource, *, partial: bool) -> None:
        load_weights(
            self._model,
            source,
            self._tied,
            self._skipped,
            partial=partial,
            quantizer=self._quantizer,
            heartbeat=self._model.tp.heartbeat,
        )
