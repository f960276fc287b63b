"""MiniMax-M2 with Hugging Face's module names: q/k norm over all heads, sigmoid routing with a selection bias."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.experts import Experts, in_block
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.layers.routers import Routed, Router
from tapscope.engine.models.decoder import DecoderLayer
from tapscope.engine.models.moe import MoeCausalLM
from tapscope.engine.models.olmo import Olmo2Attention


class MiniMaxM2Router(Router):
    """Top-k of sigmoid scores plus a bias, weighted by the normalized scores without the bias.

    Counterpart of transformers' MiniMaxM2TopKRouter.
    """

    def forward(self, hidden_states: Tensor, e_score_correction_bias: Tensor) -> Routed:  # type: ignore[override]
        """Map [tokens, hidden] to logits [tokens, experts], and weights and expert ids, [tokens, k] each."""
        logits = linear(hidden_states, self.weight)
        scores = logits.float().sigmoid()
        weights, self.chosen = self.top(scores + e_score_correction_bias, scores, is_sorted=False)
        return logits, weights / weights.sum(dim=-1, keepdim=True), self.chosen


class MiniMaxM2SparseMoeBlock(CheckpointModule):
    """Routed experts; counterpart of transformers' class of the same name."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None, "a sparse block needs ModelConfig.moe"
        self.moe = config.moe
        self.gate = MiniMaxM2Router(config.moe, config.hidden_size, dtype)
        self.experts = Experts(config.moe, config.hidden_size, config.activation, tp, dtype)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.moe.num_experts))
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        _, weights, chosen = self.gate(hidden_states, self.e_score_correction_bias)
        output: Tensor = self.experts(hidden_states, chosen, weights)
        return output

    def layouts(self, path: str) -> Iterator[list[WeightSlice]]:
        """Yield the layouts of the float32 bias, named as in checkpoints and as in this model."""
        name, bias = f"{path}.e_score_correction_bias", self.e_score_correction_bias
        for stored in dict.fromkeys((in_block(name, self.moe.block), name)):
            yield [WeightSlice(stored, tuple(bias.shape), bias)]


class MiniMaxM2DecoderLayer(DecoderLayer):
    """Counterpart of transformers' MiniMaxM2DecoderLayer."""

    attention_class = Olmo2Attention

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``mlp`` module of layer ``layer``."""
        return MiniMaxM2SparseMoeBlock(config, tp, dtype)


class MiniMaxM2ForCausalLM(MoeCausalLM):
    """MiniMax-M2; transformers' `modeling_minimax_m2.py`. Multi-token prediction layers are skipped."""

    layer_class = MiniMaxM2DecoderLayer
    skipped_prefixes = ("model.mtp.", "mtp.")
