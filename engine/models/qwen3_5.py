"""Qwen3.5 text with Hugging Face's module names: Qwen3-Next with different projections, dense or with experts."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.linear import ColumnParallelLinear, PackedLinear
from tapscope.engine.models.decoder import Decoder
from tapscope.engine.models.multimodal import TextModel
from tapscope.engine.models.qwen3_next import GatedDeltaNet, Qwen3NextDecoderLayer, Qwen3NextForCausalLM


class Qwen3_5GatedDeltaNet(GatedDeltaNet):
    """Gated delta net with a single projection for queries, keys and values, not grouped by head.

    Counterpart of transformers' Qwen3_5GatedDeltaNet.
    """

    def make_projections(self, config: ModelConfig, heads: Shard, dtype: torch.dtype) -> None:
        """Create ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and ``in_proj_a``."""
        keys, features = heads.scaled(self.linear.key_dim), self.values.scaled(self.linear.value_dim)
        parts = {"query": keys, "key": keys, "value": features}
        self.in_proj_qkv = PackedLinear(config.hidden_size, parts, False, dtype)
        self.in_proj_z = ColumnParallelLinear(config.hidden_size, features, False, dtype)
        self.in_proj_b = ColumnParallelLinear(config.hidden_size, self.values, False, dtype)
        self.in_proj_a = ColumnParallelLinear(config.hidden_size, self.values, False, dtype)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the projections, see :meth:`.GatedDeltaNet.project`."""
        mixed, gate = self.in_proj_qkv(hidden_states), self.in_proj_z(hidden_states)
        return mixed, gate, self.in_proj_b(hidden_states), self.in_proj_a(hidden_states)


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):
    """Counterpart of transformers' Qwen3_5DecoderLayer and Qwen3_5MoeDecoderLayer."""

    recurrent_class = Qwen3_5GatedDeltaNet


class Qwen3_5Decoder(Decoder):
    """Counterpart of transformers' Qwen3_5TextModel."""

    def make_rotary(self, config: ModelConfig) -> nn.Module:
        """Create ``rotary_emb``.

        Its positions are not a site, because transformers repeats them for three image axes.
        """
        rotary: nn.Module = super().make_rotary(config)
        rotary.tap_ports = ("out",)  # type: ignore[assignment]
        return rotary


class Qwen3_5TextModel(TextModel):
    """Counterpart of transformers' Qwen3_5Model."""

    decoder_class = Qwen3_5Decoder


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """Qwen3.5 text, dense; transformers' `modeling_qwen3_5.py`. Multi-token prediction layers are skipped."""

    decoder_class: ClassVar[type[nn.Module]] = Qwen3_5Decoder
    layer_class = Qwen3_5DecoderLayer
    skipped_prefixes = ("mtp.", "model.visual.")
    checkpoint_prefixes = {"model.language_model.": "model."}  # noqa: RUF012


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 text with experts; transformers' `modeling_qwen3_5_moe.py`."""


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The text model of Qwen3.5 checkpoints; transformers' `modeling_qwen3_5.py`."""

    decoder_class = Qwen3_5TextModel
    tied_weights = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012
    checkpoint_prefixes = {}  # noqa: RUF012


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    """The text model of Qwen3.5 checkpoints with experts; transformers' `modeling_qwen3_5_moe.py`."""
