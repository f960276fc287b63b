"""DeltaLayer: the short convolution and the gated delta rule of all requests of a step, with their states."""

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.gated_delta import chunked, l2_normalised, recurrent
from tapscope.engine.layers.recurrent_layer import RecurrentLayer
from tapscope.engine.layers.short_conv import ConvWeight, causal_conv, windows_after


class DeltaLayer(RecurrentLayer):
    """Base class of layers with a gated delta rule (:mod:`.gated_delta`), with this rank's heads."""

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
        """Convolution and delta rule of all requests, which read and write their states.

        ``mixed``: queries, keys and values [tokens, channels]; ``decay`` [tokens, value heads, 1 or key] and ``beta``
        [tokens, value heads], float32 -> [tokens, value heads, value], float32.
        """
        states, outputs = cache.states, []
        assert states is not None, "the cache has no recurrent states"
        for own, of_rows in self.groups(cache):
            before, matrix = states.read(self.layer, own)
            part = mixed[of_rows].view(len(before), -1, mixed.shape[1])
            rows, window = causal_conv(part, before, self.conv1d.weight[:, 0])
            parts = (*self._heads(rows.flatten(0, 1)), decay[of_rows], beta[of_rows])
            num_rows, num_drafts = len(parts[0]), len(states.draft_slots.get(own.start, ()))
            if self.is_recurrent or num_drafts:
                matrices = []
                for row in range(num_rows):
                    query, key, value, rate, share = (part[row : row + 1] for part in parts)
                    output, matrix = recurrent(query, key, value, rate, share, matrix)
                    outputs.append(output)
                    matrices.append(matrix)
                if num_drafts:
                    matrix = matrices[-num_drafts - 1]
                    windows = windows_after(mixed[of_rows], before[0])[-num_drafts - 1 :]
                    window = windows[:1]
                    states.write_drafts(self.layer, own.start, windows[1:], torch.cat(matrices[-num_drafts:]))
            elif num_rows == len(matrix):
                output, matrix = recurrent(*parts, matrix)
                outputs.append(output)
            else:
                output, after = chunked(*parts, matrix[0])
                matrix = after.unsqueeze(0)
                outputs.append(output)
            states.write(self.layer, own, window, matrix)
        self.show_states(cache)
        return torch.cat(outputs)

    def _heads(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [n, channels] -> scaled query, key and value [n, value heads, features], float32."""
        linear, keys = self.linear, self.conv1d.parts[0].count
        parts = torch.split(functional.silu(rows), [keys, keys, rows.shape[-1] - 2 * keys], dim=-1)
        query, key = (
            l2_normalised(part.reshape(len(rows), -1, linear.key_dim).float()).repeat_interleave(linear.group, dim=1)
            for part in parts[:2]
        )
        return query * linear.key_dim**-0.5, key, parts[2].reshape(len(rows), -1, linear.value_dim).float()
