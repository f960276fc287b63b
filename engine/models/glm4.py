"""GLM-4 and GLM-4.5 with Hugging Face's module names: partial rotary embedding, interleaved in dense models."""

import torch
from torch import Tensor

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.norm import RMSNorm
from tapscope.engine.layers.rope import rotate_pairs
from tapscope.engine.layers.routers import DeepseekV3Router
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import CausalLM, DecoderLayer
from tapscope.engine.models.moe import MoeCausalLM, MoeDecoderLayer
from tapscope.engine.models.phi3 import Phi3MLP


class GlmAttention(SelfAttention):
    """Counterpart of transformers' GlmAttention and Glm4Attention."""

    has_kernel = False

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs of adjacent features in the first part of each head."""
        return rotate_pairs(states, cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0])


class GlmDecoderLayer(DecoderLayer):
    """Counterpart of transformers' GlmDecoderLayer."""

    attention_class = GlmAttention
    mlp_class = Phi3MLP


class GlmForCausalLM(CausalLM):
    """GLM-4 9B, arXiv:2406.12793; transformers' `modeling_glm.py`."""

    layer_class = GlmDecoderLayer


class Glm4DecoderLayer(GlmDecoderLayer):
    """Layer with additional norms after attention and MLP; counterpart of transformers' Glm4DecoderLayer."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.post_self_attn_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def attention_summand(self, output: Tensor) -> Tensor:
        """Normalize the attention output."""
        normalised: Tensor = self.post_self_attn_layernorm(output)
        return normalised

    def mlp_summand(self, output: Tensor) -> Tensor:
        """Normalize the MLP output."""
        normalised: Tensor = self.post_mlp_layernorm(output)
        return normalised


class Glm4ForCausalLM(CausalLM):
    """GLM-4-0414 and GLM-Z1; transformers' `modeling_glm4.py`."""

    layer_class = Glm4DecoderLayer


class Glm4MoeDecoderLayer(MoeDecoderLayer):
    """Counterpart of transformers' Glm4MoeDecoderLayer."""

    router = DeepseekV3Router


class Glm4MoeForCausalLM(MoeCausalLM):
    """GLM-4.5 and 4.6, arXiv:2508.06471; transformers' `modeling_glm4_moe.py`."""

    layer_class = Glm4MoeDecoderLayer
