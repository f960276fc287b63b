"""Multi-token prediction (MTP) layers, arXiv:2412.19437 section 2.2, with the names of transformers' MtpModel."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tapscope.engine.hf_config.family import FULL
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.cache_layout import CacheLayout
from tapscope.engine.layers.linear import ReplicatedLinear
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.models.draft_head import DraftHead, SharedModule


class MtpLayer(nn.Module):
    """Decoder layer of the target's class, applied to a projection of embedding and hidden state."""

    def __init__(self, config: ModelConfig, target: CausalLM, dtype: torch.dtype) -> None:
        super().__init__()
        layer = target.layer_class
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.post_norm = (layer.norm_class(size, eps, dtype) for _ in range(3))
        self.eh_proj = ReplicatedLinear(2 * size, size, False, dtype)
        self.mtp_block = layer(config, 0, target.tp, dtype)
        self.tap_dims = {"in[inputs_embeds]": WHOLE, "in[previous_hidden_state]": WHOLE, "out": WHOLE}

    def forward(self, inputs_embeds: Tensor, previous_hidden_state: Tensor, **inputs: Any) -> Tensor:
        """Map embeddings and hidden states, [tokens, hidden] each, to normalized [tokens, hidden]."""
        both = torch.cat((self.enorm(inputs_embeds), self.hnorm(previous_hidden_state)), dim=-1)
        output: Tensor = self.post_norm(self.mtp_block(self.eh_proj(both), **inputs))
        return output


class MtpModel(DraftHead):
    """The first MTP layer of a checkpoint; it also computes later drafts, as in SGLang."""

    skipped_prefixes = ("model.", "lm_head.", "mtp.", "embed_tokens.", "shared_head.")

    def __init__(self, config: ModelConfig, target: CausalLM, dtype: torch.dtype) -> None:
        """``config`` is a result of :func:`mtp_config`."""
        super().__init__(config, target)
        self.checkpoint_prefixes = mtp_prefixes(target.config)  # type: ignore[misc]  # a property of the target
        self.layers = nn.ModuleList([MtpLayer(config, target, dtype)])
        self.shared_head = SharedModule(target.lm_head)

    def cache_layout(self, layer: int) -> CacheLayout:
        """Return the layout of the target's layers."""
        return type(self._target[0]).cache_layout(self, layer)

    def compute(self, inputs_embeds: Tensor, hidden_states: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Run the MTP layer, see :meth:`.DraftHead.compute`.

        The next row reads the normalized state, like the target's.
        """
        output = self.layers[0](inputs_embeds, hidden_states, **inputs)
        return output, output

    def output_head(self, hidden_states: Tensor) -> Tensor:
        """Compute logits with the target's output head."""
        return self.target_logits(self.shared_head, hidden_states)


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Return the config of an MTP layer of ``target``: one full-attention layer, with experts if the model has any."""
    moe = None if target.moe is None else replace(target.moe, dense_layers=frozenset())
    return replace(target, num_layers=1, layer_types=(FULL,), moe=moe, linear=None, num_skipped_layers=0)


def mtp_prefixes(target: ModelConfig) -> Mapping[str, str]:
    """Map prefixes of MTP tensors in a checkpoint of ``target`` to prefixes in MtpModel."""
    return LAYOUTS[target.architecture](target)


def _layer_after_the_last(target: ModelConfig) -> Mapping[str, str]:
    """Return prefixes for MTP layers stored as `model.layers.N.`, which mixes MTP tensors with those of the block."""
    layer = f"model.layers.{target.num_layers}."
    named = {f"{layer}{name}.": f"layers.0.{name}." for name in ("enorm", "hnorm", "eh_proj")}
    shared = {f"{layer}shared_head.head.": "shared_head.", f"{layer}embed_tokens.": "embed_tokens."}
    return named | shared | {f"{layer}shared_head.norm.": "layers.0.post_norm.", layer: "layers.0.mtp_block."}


def _own_module(target: ModelConfig) -> Mapping[str, str]:
    """Return prefixes for MTP layers stored as `mtp.`, with the block in `mtp.layers.0.`."""
    return {
        "mtp.fc.": "layers.0.eh_proj.",
        "mtp.pre_fc_norm_embedding.": "layers.0.enorm.",
        "mtp.pre_fc_norm_hidden.": "layers.0.hnorm.",
        "mtp.norm.": "layers.0.post_norm.",
        "mtp.layers.0.": "layers.0.mtp_block.",
    }


LAYOUTS: dict[str, Callable[[ModelConfig], Mapping[str, str]]] = {
    "DeepseekV3ForCausalLM": _layer_after_the_last,
    "Glm4MoeForCausalLM": _layer_after_the_last,
    "Qwen3NextForCausalLM": _own_module,
}
"""Architecture -> function that returns the prefixes of its MTP tensors."""
