"""Zamba2 with Hugging Face's module names: Mamba-2 layers, some of them preceded by a shared attention block."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tapscope.engine.checkpoint.weight_loader import default_weight_slices
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.hf_config.zamba2_config import SharedBlocks
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.activation import Activation
from tapscope.engine.layers.linear import (
    ColumnParallelLinear,
    FusedLinear,
    Linear,
    PackedLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from tapscope.engine.layers.norm import RMSNorm
from tapscope.engine.layers.probe import ANGLE_INPUTS, WHOLE
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import Decoder, DecoderLayer, ModelOutput
from tapscope.engine.models.mamba2 import Mamba2CausalLM, Mamba2Mixer

_LAYER_DIMS = ANGLE_INPUTS | dict.fromkeys(
    ("in[hidden_states]", "in[original_hidden_states]", "in[transformer_hidden_states]", "out"), WHOLE
)
_MIXER_EPS = 1e-5  # for the norm in a mixer, for which transformers ignores rms_norm_eps


def _adapters(
    blocks: SharedBlocks, number: int, ins: int, make: Callable[[int], Linear], dtype: torch.dtype
) -> nn.ModuleList:
    """Create the low-rank adapters of the layers that share a block with hybrid layer ``number``; identities elsewhere.

    ``make`` creates the second matrix, given its number of inputs. Only the layer's own adapter is called and tapped.
    """
    adapters = nn.ModuleList()
    for each in range(len(blocks.layers)):
        adapter: nn.Module = nn.Identity()
        if each % blocks.num_blocks == number % blocks.num_blocks:
            second = make(blocks.adapter_rank)
            adapter = nn.Sequential(ReplicatedLinear(ins, blocks.adapter_rank, False, dtype), second)
            adapter.tap_dims, adapter.tap_ports = second.tap_dims, second.tap_ports  # type: ignore[assignment]
        if each != number:
            for module in adapter.modules():
                module.tap_ports = ()  # type: ignore[assignment]
        adapters.append(adapter)
    return adapters


def _share(module: nn.Module, source: nn.Module) -> None:
    """Replace the parameters of ``module`` by those of ``source``."""
    for name, value in list(source.named_parameters()):
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, value)


class Zamba2Attention(SelfAttention):
    """Attention over the hidden states concatenated with the embeddings.

    Counterpart of transformers' Zamba2Attention.
    """

    def __init__(self, config: ModelConfig, number: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        """``number``: index among the layers that have a shared block."""
        blocks = _blocks(config)
        super().__init__(config, blocks.layers[number], tp, dtype)
        self.number, wide = number, 2 * config.hidden_size
        self.qkv_proj = FusedLinear(wide, self.qkv_proj.parts, False, dtype)
        self.has_adapters = blocks.adapts_attention
        if self.has_adapters:
            self.linear_q_adapter_list, self.linear_k_adapter_list, self.linear_v_adapter_list = (
                _adapters(
                    blocks, number, wide, partial(ColumnParallelLinear, outputs=part, bias=False, dtype=dtype), dtype
                )
                for part in self.qkv_proj.parts.values()
            )

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project [tokens, 2 * hidden] to query, key and value [tokens, heads, dim], including adapters."""
        query, key, value = super().project(hidden_states)
        if self.has_adapters:
            query = query + self._heads(self.linear_q_adapter_list[self.number](hidden_states))
            key = key + self._heads(self.linear_k_adapter_list[self.number](hidden_states))
            value = value + self._heads(self.linear_v_adapter_list[self.number](hidden_states))
        return query, key, value


class Zamba2MLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one projection plus its adapter.

    Counterpart of transformers' Zamba2MLP.
    """

    def __init__(self, config: ModelConfig, number: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        blocks, hidden, shard = _blocks(config), config.hidden_size, Shard.of(config.intermediate_size, tp)
        self.number, parts = number, {"gate": shard, "up": shard}
        self.gate_up_proj = PackedLinear(hidden, parts, config.mlp_bias, dtype)
        make = lambda rank: PackedLinear(rank, parts, False, dtype)  # noqa: E731
        self.gate_up_proj_adapter_list = _adapters(blocks, number, hidden, make, dtype)
        self.act_fn = Activation(config.activation)
        self.down_proj = RowParallelLinear(shard, hidden, config.mlp_bias, tp, dtype)
        self.tap_dims = {"in[hidden_state]": WHOLE, "out": WHOLE}

    def forward(self, hidden_state: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        both = self.gate_up_proj(hidden_state) + self.gate_up_proj_adapter_list[self.number](hidden_state)
        gate, up = self.gate_up_proj.split(both)
        output: Tensor = self.down_proj(self.act_fn(gate) * up)
        return output


class Zamba2AttentionDecoderLayer(nn.Module):
    """A shared block without residual connections; counterpart of transformers' Zamba2AttentionDecoderLayer."""

    def __init__(self, config: ModelConfig, number: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Zamba2Attention(config, number, tp, dtype)
        self.feed_forward = Zamba2MLP(config, number, tp, dtype)
        self.input_layernorm = RMSNorm(2 * config.hidden_size, config.rms_norm_eps, dtype)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        for module in self.modules():
            if isinstance(module, Linear):
                module.may_stay_quantized = False  # layers that share a weight would not share its scales
        self.tap_dims = _LAYER_DIMS

    def forward(
        self,
        hidden_states: Tensor,
        original_hidden_states: Tensor,
        position_embeddings: Any,
        past_key_values: StepCache,
    ) -> Tensor:
        """Map hidden states and embeddings, [tokens, hidden] each, to [tokens, hidden]."""
        both = torch.cat((hidden_states, original_hidden_states), dim=-1)
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(both),
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
        )
        output: Tensor = self.feed_forward(self.pre_ff_layernorm(attended))
        return output


class Zamba2MambaDecoderLayer(DecoderLayer):
    """Mamba-2 behind a norm; counterpart of transformers' Zamba2MambaDecoderLayer."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # skips the attention, MLP and norms of DecoderLayer
        self.mamba = Mamba2Mixer(config, layer, tp, dtype)
        assert self.mamba.norm is not None
        self.mamba.norm.eps = _MIXER_EPS
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.tap_dims = _LAYER_DIMS

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        past_key_values: StepCache,
        transformer_hidden_states: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; ``transformer_hidden_states`` is added to the mixer's input only."""
        added = hidden_states if transformer_hidden_states is None else hidden_states + transformer_hidden_states
        output: Tensor = hidden_states + self.mamba(self.input_layernorm(added), past_key_values)
        return output


class Zamba2HybridLayer(nn.Module):
    """A shared block, a projection of its output, and Mamba-2; counterpart of transformers' Zamba2HybridLayer."""

    def __init__(self, config: ModelConfig, number: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.shared_transformer = Zamba2AttentionDecoderLayer(config, number, tp, dtype)
        self.linear = ReplicatedLinear(config.hidden_size, config.hidden_size, False, dtype)
        self.mamba_decoder = Zamba2MambaDecoderLayer(config, _blocks(config).layers[number], tp, dtype)
        self.tap_dims = _LAYER_DIMS

    def forward(
        self,
        hidden_states: Tensor,
        original_hidden_states: Tensor,
        position_embeddings: Any,
        past_key_values: StepCache,
    ) -> Tensor:
        """Map hidden states and embeddings, [tokens, hidden] each, to [tokens, hidden]."""
        mixed = self.shared_transformer(
            hidden_states,
            original_hidden_states=original_hidden_states,
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
        )
        output: Tensor = self.mamba_decoder(hidden_states, past_key_values, self.linear(mixed))
        return output


class Zamba2Model(Decoder):
    """Counterpart of transformers' Zamba2Model; hybrid layers also receive the embeddings."""

    final_norm_name = "final_layernorm"

    def make_layers(
        self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, layer_class: type[DecoderLayer]
    ) -> Iterator[nn.Module]:
        """Yield the modules of ``layers``; blocks share the parameters of the first layer that has them."""
        blocks, first = _blocks(config), dict[int, nn.Module]()
        for layer in range(config.num_layers):
            if layer not in blocks.layers:
                yield layer_class(config, layer, tp, dtype)
                continue
            number = blocks.layers.index(layer)
            hybrid = Zamba2HybridLayer(config, number, tp, dtype)
            _share(hybrid.shared_transformer, first.setdefault(number % blocks.num_blocks, hybrid.shared_transformer))
            yield hybrid

    def make_rotary(self, config: ModelConfig) -> Any:
        """Create ``rotary_emb``; None without ``use_mem_rope``."""
        return None if config.no_rope_layers else super().make_rotary(config)

    def forward(self, input_ids: Tensor, position_ids: Tensor, past_key_values: StepCache) -> ModelOutput:
        """Map token ids and positions [tokens] to the last hidden states [tokens, hidden]."""
        hidden_states = embedded = self.embedding(input_ids)
        rotations = self.rotations(hidden_states, position_ids, past_key_values)
        for number, (layer, rotation) in enumerate(zip(self.layers, rotations, strict=True)):
            self.start_layer(number, hidden_states)
            hidden_states = layer(
                hidden_states,
                original_hidden_states=embedded,
                position_embeddings=rotation,
                past_key_values=past_key_values,
            )
        self.end_layers(hidden_states)
        return ModelOutput(self.final_norm(hidden_states))


class Zamba2ForCausalLM(Mamba2CausalLM):
    """Zamba2, arXiv:2411.15242; transformers' `modeling_zamba2.py`."""

    decoder_class = Zamba2Model
    layer_class = Zamba2MambaDecoderLayer

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, tp, dtype)
        blocks, shared = _blocks(config), dict[str, str]()
        for number, layer in enumerate(blocks.layers):
            first = blocks.layers[number % blocks.num_blocks]
            if layer != first:
                own, source = (f"model.layers.{each}.shared_transformer" for each in (layer, first))
                names = [part.name for part in default_weight_slices(self.get_submodule(own))]
                shared |= {f"{own}.{name}": f"{source}.{name}" for name in names}
        self.shared_weights = shared  # type: ignore[misc]  # those of this model's layers


def _blocks(config: ModelConfig) -> SharedBlocks:
    assert config.shared_blocks is not None, "Zamba2 needs ModelConfig.shared_blocks"
    return config.shared_blocks
