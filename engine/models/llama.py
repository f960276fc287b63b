"""Families that use the shared decoder unchanged and differ only in their ModelConfig."""

from tapscope.engine.models.decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    """Llama 2 and 3, arXiv:2307.09288 and 2407.21783; transformers' `modeling_llama.py`."""


class MistralForCausalLM(CausalLM):
    """Mistral, arXiv:2310.06825: sliding-window attention in all layers; transformers' `modeling_mistral.py`."""


class Ministral3ForCausalLM(CausalLM):
    """Ministral 3: position-dependent scaling of queries; transformers' `modeling_ministral3.py`."""


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and 2.5, arXiv:2407.10671: biases in q/k/v projections; transformers' `modeling_qwen2.py`."""


class SmolLM3ForCausalLM(CausalLM):
    """SmolLM3: no rotary embedding in every fourth layer, arXiv:2501.18795; transformers' `modeling_smollm3.py`."""


class Qwen3ForCausalLM(CausalLM):
    """Qwen3, arXiv:2505.09388: q/k norm per head; transformers' `modeling_qwen3.py`."""
