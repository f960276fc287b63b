"""OLMoE under Hugging Face's names: q/k norm over all heads, experts in every layer."""

import torch
from torch import nn

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.routers import Qwen3MoeRouter
from tapscope.engine.models.moe import MoeCausalLM, MoeDecoderLayer
from tapscope.engine.models.olmo import Olmo2Attention


class OlmoeDecoderLayer(MoeDecoderLayer):
    """transformers' OlmoeDecoderLayer."""

    router = Qwen3MoeRouter

    def make_attention(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """``self_attn`` of layer ``layer``."""
        return Olmo2Attention(config, layer, tp, dtype)


class OlmoeForCausalLM(MoeCausalLM):
    """OLMoE, arXiv:2409.02060; transformers' `modeling_olmoe.py`."""

    layer_class = OlmoeDecoderLayer
