"""DraftHead: a draft model that reads the target's hidden states and shares its embedding and output head."""

from typing import Any

from torch import Tensor, nn

from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.probe import TOKENS, Probe
from tapscope.engine.layers.rope import RotaryEmbedding
from tapscope.engine.models.decoder import CausalLM, CausalLMOutput, ModelOutput


class SharedModule(nn.Module):
    """Proxy for a module of the target under the head's own name: the head has its own taps but the target's
    weights.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._target = (module,)  # in a tuple, so that nn.Module does not register it
        self.tap_dims: dict[str, str] = dict(getattr(module, "tap_dims", {}))
        self.tap_rows: dict[str, str] = dict(getattr(module, "tap_rows", {}))

    def forward(self, input: Tensor) -> Tensor:
        """Call the target module's ``forward`` without its hooks, which belong to the target's steps."""
        output: Tensor = self._target[0].forward(input)
        return output


class DraftHead(CausalLM):
    """Base class of draft heads, which predict tokens from hidden states.

    The row at position p reads the token at p + 1 and the hidden state at p, and predicts the token at p + 2. Hidden
    states are the target's, or the head's own outputs at positions that the target has not computed.
    """

    def __init__(self, config: ModelConfig, target: CausalLM) -> None:
        """``config`` is the head's, with the target's vocabulary. The head runs on the ranks of ``target``."""
        nn.Module.__init__(self)  # CausalLM.__init__ would create a decoder
        config.check_split(target.tp.size)
        self.config, self.tp = config, target.tp
        self._target = (target,)
        self.decoder_graph = None
        self.last_hidden_state = None
        self.embed_tokens = SharedModule(target.decoder.embedding)
        self.rotary_emb = RotaryEmbedding(config.rope, config.rope.rotary_dim(config.head_dim))
        self.sampler = Probe(TOKENS, rows="logits")
        inputs = dict.fromkeys(("in[input_ids]", "in[position_ids]", "in[logits_to_keep]"), TOKENS)
        self.tap_dims = inputs | {"in[hidden_states]": "t h # tp:replicated", "out[logits]": "t v # tp:replicated"}
        self.tap_rows = {"in[logits_to_keep]": "logits", "out[logits]": "logits"}

    @property
    def decoder(self) -> Any:
        """Everything before the output head: token ids and hidden states -> :class:`ModelOutput`."""
        return self._decode

    def read(self, hidden_states: Tensor) -> Tensor:
        """Project hidden states [tokens, width] to [tokens, hidden]; states of width ``hidden`` are unchanged."""
        return hidden_states

    def compute(self, inputs_embeds: Tensor, hidden_states: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the inputs of the output head and of the next row, from embeddings and hidden states [tokens, hidden].

        ``inputs``: position_ids, position_embeddings and past_key_values of the layer.
        """
        raise NotImplementedError

    def output_head(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states [rows, hidden] to logits [rows, vocab], complete on every rank."""
        raise NotImplementedError

    def target_logits(self, lm_head: nn.Module, hidden_states: Tensor) -> Tensor:
        """Return logits [rows, vocab] computed by the target's output head."""
        return self._target[0].scaled_logits(self.tp.all_gather(lm_head(hidden_states), self.config.vocab_size))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: StepCache,
        logits_to_keep: Tensor | None = None,
        hidden_states: Tensor | None = None,
    ) -> CausalLMOutput:
        """Map ids and positions [tokens] and hidden states [tokens, width] to the logits of rows ``logits_to_keep``."""
        assert hidden_states is not None, "a head reads hidden states"
        output = self._decode(input_ids, position_ids, past_key_values, hidden_states)
        return CausalLMOutput(self.head(output.last_hidden_state, logits_to_keep))

    def head(self, hidden_states: Tensor, logits_to_keep: Tensor | None = None) -> Tensor:
        """Compute logits like :meth:`.CausalLM.head`, but keep :attr:`last_hidden_state`, which the next row reads."""
        return self.output_head(hidden_states if logits_to_keep is None else hidden_states[logits_to_keep])

    def _decode(
        self, input_ids: Tensor, position_ids: Tensor, past_key_values: StepCache, hidden_states: Tensor
    ) -> ModelOutput:
        self.tp.heartbeat.start_layer(0)
        embeds = self.embed_tokens(input_ids)
        lengths = {} if self.config.is_prefix_shareable else {"lengths": past_key_values.row_lengths}
        rotation = self.rotary_emb(embeds, position_ids=position_ids, **lengths)
        normalised, self.last_hidden_state = self.compute(
            embeds,
            hidden_states,
            position_ids=position_ids,
            position_embeddings=rotation,
            past_key_values=past_key_values,
        )
        return ModelOutput(normalised)
