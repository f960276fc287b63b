"""Nemotron-H with Hugging Face's module names: each layer is Mamba-2, attention, an MLP or experts, behind one norm."""

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.family import FULL, LINEAR, MLP
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.activation import Activation
from tapscope.engine.layers.experts import UngatedExperts
from tapscope.engine.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from tapscope.engine.layers.norm import Olmo2RMSNorm
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.layers.routers import DeepseekV3Router
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import Rotation
from tapscope.engine.models.mamba2 import Mamba2CausalLM, Mamba2Mixer, MixerLayer, UnrotatedDecoder
from tapscope.engine.models.moe import MoeCausalLM


class NemotronHMLP(nn.Module):
    """down_proj(act(up_proj(x))); counterpart of transformers' NemotronHMLP."""

    def __init__(self, config: ModelConfig, size: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        shard = Shard.of(size, tp)
        self.up_proj = ColumnParallelLinear(config.hidden_size, shard, config.mlp_bias, dtype)
        self.act_fn = Activation(config.activation)
        self.down_proj = RowParallelLinear(shard, config.hidden_size, config.mlp_bias, tp, dtype)
        self.tap_dims = {"in[x]": WHOLE, "out": WHOLE}

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        output: Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
        return output


class NemotronHMoE(nn.Module):
    """Routed experts plus a shared one; with ``moe_latent_size``, the routed experts work on a projected latent.

    Counterpart of transformers' NemotronHMoE.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None, "a sparse block needs ModelConfig.moe"
        hidden, latent = config.hidden_size, config.moe.latent_size
        self.experts = UngatedExperts(config.moe, latent or hidden, config.activation, tp, dtype)
        self.gate = DeepseekV3Router(config.moe, hidden, dtype)
        self.shared_experts = NemotronHMLP(config, config.moe.shared_size, tp, dtype)
        self.fc1_latent_proj = ReplicatedLinear(hidden, latent, config.mlp_bias, dtype) if latent else nn.Identity()
        self.fc2_latent_proj = ReplicatedLinear(latent, hidden, config.mlp_bias, dtype) if latent else nn.Identity()
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        _, weights, chosen = self.gate(hidden_states)
        routed = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(hidden_states), chosen, weights))
        output: Tensor = routed + self.shared_experts(hidden_states)
        return output


class NemotronHBlock(MixerLayer):
    """Counterpart of transformers' NemotronHBlock."""

    norm_class = Olmo2RMSNorm  # like transformers' NemotronHRMSNorm, multiplies by the weight in float32

    def make_mixer(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``mixer`` module of layer ``layer``, selected by its layer type."""
        self.kind = config.layer_types[layer]
        if self.kind == LINEAR:
            return Mamba2Mixer(config, layer, tp, dtype)
        if self.kind == FULL:
            return SelfAttention(config, layer, tp, dtype)
        if self.kind == MLP:
            return NemotronHMLP(config, config.intermediate_size, tp, dtype)
        return NemotronHMoE(config, tp, dtype)

    def mix(self, hidden_states: Tensor, cache: StepCache, position_embeddings: Rotation) -> Tensor:
        """Return the mixer's output for normalized hidden states [tokens, hidden]."""
        if self.kind == LINEAR:
            return super().mix(hidden_states, cache, position_embeddings)
        if self.kind == FULL:
            attended: Tensor = self.mixer(
                hidden_states, position_embeddings=position_embeddings, past_key_values=cache
            )[0]
            return attended
        output: Tensor = self.mixer(hidden_states)
        return output


class NemotronHModel(UnrotatedDecoder):
    """Counterpart of transformers' NemotronHModel."""

    embedding_name = "embeddings"
    final_norm_name = "norm_f"


class NemotronHForCausalLM(Mamba2CausalLM, MoeCausalLM):
    """Nemotron-H and Nemotron 3, arXiv:2504.03624; transformers' `modeling_nemotron_h.py`."""

    decoder_class = NemotronHModel
    layer_class = NemotronHBlock
    checkpoint_prefixes = {"backbone.": "model."}  # noqa: RUF012
    skipped_prefixes = ("mtp.",)
    tied_weights = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012
