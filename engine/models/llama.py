"""Families that are the shared decoder as it stands: what tells them apart is in ModelConfig."""

from tapscope.engine.models.decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    """Llama 2 and 3, arXiv:2307.09288 and 2407.21783; transformers' `modeling_llama.py`."""
