"""DeltaLayer: short convolution and gated delta rule for all requests of a step, with their recurrent states."""

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.gated_delta import chunked, l2_normalised, recurrent
from tapscope.engine.layers.recurrent_layer import RecurrentLayer
from tapscope.engine.layers.short_conv import ConvWeight


class DeltaLayer(RecurrentLayer):
    """Base class of layers with a gated delta rule (:mod:`.gated_delta`), for this rank's heads."""

    conv_class: type[ConvWeight] = ConvWeight
    """Class of ``conv1d``."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.linear is not None, "linear attention needs ModelConfig.linear"
        self.layer, self.linear = layer, config.linear
        heads = Shard.of(config.linear.num_key_heads, tp)
        keys, features = heads.scaled(self.linear.key_dim), heads.scaled(self.linear.group * self.linear.value_dim)
        self.conv1d = self.conv_class((keys, keys, features), self.linear.kernel, dtype)
        self.add_state_taps({"q": keys, "k": keys, "v": features}, tp.size, "num_heads[tp] k d")

    def attend(self, mixed: Tensor, decay: Tensor, beta: Tensor, cache: StepCache) -> Tensor:
        """Run the convolution and the delta rule for all requests, reading and writing their states in ``cache``.

        ``mixed``: queries, keys and values [tokens, channels]; ``decay`` [tokens, value heads, 1 or key] and ``beta``
        [tokens, value heads], float32. Returns [tokens, value heads, value], float32.
        """
        rows, groups = self.convolve(mixed, self.conv1d, cache)
        return self.scan((*self._heads(rows), decay, beta), groups, cache)

    def scan_row(self, parts: tuple[Tensor, ...], matrix: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`.RecurrentLayer.scan_row`; ``parts``: query, key, value, decay and beta."""
        query, key, value, decay, beta = parts
        return recurrent(query, key, value, decay, beta, matrix)

    def scan_rows(self, parts: tuple[Tensor, ...], matrix: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`.RecurrentLayer.scan_rows`; ``parts`` as in :meth:`scan_row`."""
        query, key, value, decay, beta = parts
        return chunked(query, key, value, decay, beta, matrix)

    def _heads(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split convolved rows [n, channels] into scaled query, key and value [n, value heads, features], float32."""
        linear, keys = self.linear, self.conv1d.parts[0].count
        parts = torch.split(functional.silu(rows), [keys, keys, rows.shape[-1] - 2 * keys], dim=-1)
        query, key = (
            l2_normalised(part.reshape(len(rows), -1, linear.key_dim).float()).repeat_interleave(linear.group, dim=1)
            for part in parts[:2]
        )
        return query * linear.key_dim**-0.5, key, parts[2].reshape(len(rows), -1, linear.value_dim).float()
