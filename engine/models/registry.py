"""Which class computes which architecture of config.json."""

import torch

from tapscope.engine.model_config import ModelConfig
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.models.llama import LlamaForCausalLM
from tapscope.engine.parallel import TensorParallel

MODELS: dict[str, type[CausalLM]] = {family.__name__: family for family in (LlamaForCausalLM,)}
"""Architecture name -> class; the same names as ``model_config.ARCHITECTURES``, which can be read without torch."""

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Which tensor is which when the word embeddings are tied."""


def build_model(config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> CausalLM:
    """This rank's part of the model, weights not loaded; raises UsageError when ``tp`` cannot split it."""
    return MODELS[config.architecture](config, tp, dtype)
