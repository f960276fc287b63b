"""Families that are the shared decoder as it stands: what tells them apart is in ModelConfig."""

from tapscope.engine.models.decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    """Llama 2 and 3, arXiv:2307.09288 and 2407.21783; transformers' `modeling_llama.py`."""


class MistralForCausalLM(CausalLM):
    """Mistral, arXiv:2310.06825: every layer sees a sliding window; transformers' `modeling_mistral.py`."""


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and 2.5, arXiv:2407.10671: biases of query, key and value; transformers' `modeling_qwen2.py`."""


class Qwen3ForCausalLM(CausalLM):
    """Qwen3, arXiv:2505.09388: each head of query and key is normalised; transformers' `modeling_qwen3.py`."""
