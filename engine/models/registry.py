"""Registry that maps the architecture name in config.json to a model class."""

import torch

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.models.cohere import Cohere2ForCausalLM, CohereForCausalLM
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from tapscope.engine.models.deepseek_v32 import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM
from tapscope.engine.models.falcon_h1 import FalconH1ForCausalLM
from tapscope.engine.models.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM
from tapscope.engine.models.gemma3n import Gemma3nForCausalLM, Gemma3nForConditionalGeneration
from tapscope.engine.models.gemma4 import Gemma4ForCausalLM, Gemma4ForConditionalGeneration
from tapscope.engine.models.glm4 import Glm4ForCausalLM, Glm4MoeForCausalLM, GlmForCausalLM
from tapscope.engine.models.gpt_oss import GptOssForCausalLM
from tapscope.engine.models.granite import GraniteForCausalLM
from tapscope.engine.models.jamba import BambaForCausalLM, JambaForCausalLM
from tapscope.engine.models.kimi_linear import KimiLinearForCausalLM
from tapscope.engine.models.lfm2 import Lfm2ForCausalLM
from tapscope.engine.models.llama import (
    LlamaForCausalLM,
    Ministral3ForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)
from tapscope.engine.models.llama4 import Llama4ForCausalLM, Llama4ForConditionalGeneration
from tapscope.engine.models.mamba2 import Mamba2ForCausalLM
from tapscope.engine.models.minimax_m2 import MiniMaxM2ForCausalLM
from tapscope.engine.models.moe import MixtralForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM
from tapscope.engine.models.multimodal import Gemma3ForConditionalGeneration, Mistral3ForConditionalGeneration
from tapscope.engine.models.nemotron_h import NemotronHForCausalLM
from tapscope.engine.models.olmo import Olmo2ForCausalLM, Olmo3ForCausalLM
from tapscope.engine.models.olmoe import OlmoeForCausalLM
from tapscope.engine.models.phi3 import Phi3ForCausalLM
from tapscope.engine.models.qwen3_5 import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)
from tapscope.engine.models.qwen3_next import Qwen3NextForCausalLM
from tapscope.engine.models.starcoder2 import Starcoder2ForCausalLM
from tapscope.engine.models.zamba2 import Zamba2ForCausalLM

MODELS: dict[str, type[CausalLM]] = {
    model.__name__: model
    for model in (
        LlamaForCausalLM,
        MistralForCausalLM,
        Ministral3ForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        SmolLM3ForCausalLM,
        GraniteForCausalLM,
        Phi3ForCausalLM,
        GlmForCausalLM,
        Glm4ForCausalLM,
        CohereForCausalLM,
        Cohere2ForCausalLM,
        Starcoder2ForCausalLM,
        FalconH1ForCausalLM,
        Mamba2ForCausalLM,
        BambaForCausalLM,
        Zamba2ForCausalLM,
        Lfm2ForCausalLM,
        Olmo2ForCausalLM,
        Olmo3ForCausalLM,
        Gemma2ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3ForConditionalGeneration,
        Gemma3nForCausalLM,
        Gemma3nForConditionalGeneration,
        Mistral3ForConditionalGeneration,
        MixtralForCausalLM,
        Qwen2MoeForCausalLM,
        Qwen3MoeForCausalLM,
        Qwen3NextForCausalLM,
        Qwen3_5ForCausalLM,
        Qwen3_5MoeForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeForConditionalGeneration,
        GptOssForCausalLM,
        JambaForCausalLM,
        NemotronHForCausalLM,
        OlmoeForCausalLM,
        Glm4MoeForCausalLM,
        MiniMaxM2ForCausalLM,
        Llama4ForCausalLM,
        Llama4ForConditionalGeneration,
        KimiLinearForCausalLM,
        DeepseekV2ForCausalLM,
        DeepseekV3ForCausalLM,
        DeepseekV32ForCausalLM,
        GlmMoeDsaForCausalLM,
        Gemma4ForCausalLM,
        Gemma4ForConditionalGeneration,
    )
}
"""Architecture name -> class; same keys as ``model_config.FAMILIES``, which is importable without torch."""


def build_model(config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> CausalLM:
    """Build this rank's shard of the model, without weights. Raises UsageError if there are more ranks than heads."""
    return MODELS[config.architecture](config, tp, dtype)
