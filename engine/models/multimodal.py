"""Text models of multimodal checkpoints with Hugging Face's module names: Gemma 3 and Mistral 3. No image support."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.embedding import VocabEmbedding
from tapscope.engine.layers.probe import TOKENS, WHOLE
from tapscope.engine.models.decoder import CausalLM, Decoder, DecoderLayer, ModelOutput
from tapscope.engine.models.gemma import Gemma3Decoder, GemmaDecoderLayer


class TextModel(nn.Module):
    """A multimodal model without vision tower and projector; the decoder is ``language_model``."""

    decoder_class: ClassVar[type[Decoder]] = Decoder

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, layer_class: type[DecoderLayer]
    ) -> None:
        super().__init__()
        self.language_model = self.decoder_class(config, tp, dtype, layer_class)
        self.tap_dims = {"in[input_ids]": TOKENS, "in[position_ids]": TOKENS, "out[last_hidden_state]": WHOLE}

    @property
    def embedding(self) -> VocabEmbedding:
        """Token embedding of the decoder."""
        return self.language_model.embedding

    def forward(self, input_ids: Tensor, position_ids: Tensor, past_key_values: StepCache) -> ModelOutput:
        """Map token ids and positions [tokens] to the last hidden states [tokens, hidden]."""
        output: ModelOutput = self.language_model(input_ids, position_ids=position_ids, past_key_values=past_key_values)
        return output


class Gemma3TextModel(TextModel):
    """Counterpart of transformers' Gemma3Model."""

    decoder_class = Gemma3Decoder


class MultimodalForConditionalGeneration(CausalLM):
    """Causal LM that loads the text model of a multimodal checkpoint and skips other tensors.

    Published checkpoints use the names of transformers 4 (``language_model.model.``); checkpoints saved by transformers
    5 use its module names (``model.language_model.``).
    """

    decoder_class = TextModel
    tied_weights = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012
    skipped_prefixes = ("model.vision_tower.", "model.multi_modal_projector.")
    checkpoint_prefixes = {  # noqa: RUF012
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }


class Gemma3ForConditionalGeneration(MultimodalForConditionalGeneration):
    """Gemma 3 with vision, arXiv:2503.19786; transformers' `modeling_gemma3.py`."""

    decoder_class = Gemma3TextModel
    layer_class = GemmaDecoderLayer


class Mistral3ForConditionalGeneration(MultimodalForConditionalGeneration):
    """Mistral Small 3.1 and later; transformers' `modeling_mistral3.py`."""
