"""OLMoE with Hugging Face's module names: q/k norm over all heads, experts in every layer."""

from tapscope.engine.layers.routers import Qwen3MoeRouter
from tapscope.engine.models.moe import MoeCausalLM, MoeDecoderLayer
from tapscope.engine.models.olmo import Olmo2Attention


class OlmoeDecoderLayer(MoeDecoderLayer):
    """Counterpart of transformers' OlmoeDecoderLayer."""

    attention_class = Olmo2Attention
    router = Qwen3MoeRouter


class OlmoeForCausalLM(MoeCausalLM):
    """OLMoE, arXiv:2409.02060; transformers' `modeling_olmoe.py`."""

    layer_class = OlmoeDecoderLayer
