"""Token embedding and output head, with the vocabulary split over tensor-parallel ranks."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.probe import TOKENS, WHOLE


class VocabEmbedding(CheckpointModule):
    """Token embedding with the vocabulary split over ranks; the last ranks may hold fewer rows."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.tp = (vocab_size, hidden_size), tp
        self.start, self.end = tp.span(vocab_size)
        self.weight = parameter(self.end - self.start, hidden_size, dtype=dtype)
        self.tap_dims = {"in[input]": TOKENS, "out": WHOLE}

    def forward(self, input: Tensor) -> Tensor:
        """Embed token ids [tokens] -> [tokens, hidden]; rows of other ranks' tokens are zero before the all-reduce."""
        if self.tp.size == 1:
            return functional.embedding(input, self.weight)
        elsewhere = (input < self.start) | (input >= self.end)
        if self.start == self.end:  # this rank has no part of the vocabulary
            return self.tp.all_reduce(self.weight.new_zeros(len(input), self.shape[1]))
        local = functional.embedding((input - self.start).masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(local.masked_fill(elsewhere.unsqueeze(-1), 0))

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's rows of the weight."""
        yield WeightSlice(f"{path}.weight", self.shape, self.weight, 0, self.start)


class ScaledVocabEmbedding(VocabEmbedding):
    """Token embedding times a constant, rounded to the weights' dtype as in transformers' Gemma."""

    embed_scale: Tensor

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(vocab_size, hidden_size, tp, dtype)
        self.register_buffer("embed_scale", torch.tensor(scale, dtype=dtype), persistent=False)
        self.tap_dims = {"in[input_ids]": TOKENS, "out": WHOLE}

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed token ids [tokens] -> [tokens, hidden], scaled."""
        return super().forward(input_ids) * self.embed_scale


def embedding_of(config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> VocabEmbedding:
    """Return the token embedding that ``config`` specifies."""
    if config.embedding_scale is None:
        return VocabEmbedding(config.vocab_size, config.hidden_size, tp, dtype)
    return ScaledVocabEmbedding(config.vocab_size, config.hidden_size, config.embedding_scale, tp, dtype)


class VocabHead(CheckpointModule):
    """Output head over this rank's part of the vocabulary; may share the weight of a :class:`VocabEmbedding`."""

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: TensorParallel, dtype: torch.dtype, tied: VocabEmbedding | None
    ) -> None:
        super().__init__()
        self.shape, self.is_tied = (vocab_size, hidden_size), tied is not None
        self.start, end = tp.span(vocab_size)
        self.weight = tied.weight if tied is not None else parameter(end - self.start, hidden_size, dtype=dtype)
        self.tap_dims = {"in[input]": WHOLE, "out": "t v[tp]"}
        self.tap_rows = {"in[input]": "logits", "out": "logits"}

    def forward(self, input: Tensor) -> Tensor:
        """Compute logits: [rows, hidden] -> [rows, this rank's span of the vocabulary]."""
        return linear(input, self.weight)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's rows of the weight; empty if the weight is tied to the embedding."""
        if not self.is_tied:
            yield WeightSlice(f"{path}.weight", self.shape, self.weight, 0, self.start)
