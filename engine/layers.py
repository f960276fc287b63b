"""Layers of a decoder, split over tensor-parallel ranks, each declaring what its ports look like.

Dims (see :mod:`tapscope.dims`): t packed tokens, h features, v vocabulary, d head dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.model_config import ModelConfig
from tapscope.engine.parallel import TensorParallel
from tapscope.engine.weights import Piece, Weighted

WHOLE = "t h # tp:replicated"
SHARD = "t h[tp]"
PARTIAL = "t h[tp:partial]"
TOKENS = "t # tp:replicated"
ANGLES = "t d # tp:replicated"
ANGLE_INPUTS = {"in[position_embeddings.0]": ANGLES, "in[position_embeddings.1]": ANGLES}


class Probe(nn.Module):
    """An identity that gives a value a place in the module tree, so that ordinary hooks see it."""

    tap_ports = ("out",)
    """Its input is its output; only the output is worth a tap."""

    def __init__(self, dims: str, rows: str | None = None) -> None:
        super().__init__()
        self.tap_dims = dict.fromkeys(("in[output]", "out"), dims)
        self.tap_rows = {} if rows is None else dict.fromkeys(("in[output]", "out"), rows)

    def forward(self, output: Tensor) -> Tensor:
        """``output`` itself."""
        return output


class RMSNorm(Weighted):
    """x / rms(x) * weight over the last axis, arXiv:1910.07467; sums in float32 as transformers' LlamaRMSNorm."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter(size, dtype=dtype)
        self.eps = eps
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, size] -> [tokens, size], in the input's dtype."""
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden_states.dtype)

    def pieces(self, path: str) -> Iterator[Piece]:
        """One vector, whole on every rank."""
        yield Piece(f"{path}.weight", tuple(self.weight.shape), self.weight)


class FusedLinear(Weighted):
    """Several column-parallel linears of one input as one GEMM; returns one view per part.

    ``parts`` maps each part's name, a sibling of this module in the checkpoint, to its output features.
    """

    tap_ports = ("in",)
    """Its outputs are seen under their own names, as outputs of the parts' Probes."""

    def __init__(
        self, in_features: int, parts: dict[str, int], bias: bool, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features, self.parts, self.tp = in_features, parts, tp
        self.widths = [size // tp.size for size in parts.values()]
        self.weight = _parameter(sum(self.widths), in_features, dtype=dtype)
        self.bias = _parameter(sum(self.widths), dtype=dtype) if bias else None
        self.tap_dims = {"in[input]": WHOLE} | {f"out[{i}]": SHARD for i in range(len(parts))}

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """[tokens, in_features] -> one [tokens, features / tp] view per part."""
        return torch.split(functional.linear(input, self.weight, self.bias), self.widths, dim=-1)

    def pieces(self, path: str) -> Iterator[Piece]:
        """Each part's rows of this rank, side by side."""
        parent = path.rpartition(".")[0]
        weights = torch.split(self.weight, self.widths)
        biases = torch.split(self.bias, self.widths) if self.bias is not None else ()
        for i, (name, size) in enumerate(self.parts.items()):
            start = self.tp.span(size)[0]
            yield Piece(f"{parent}.{name}.weight", (size, self.in_features), weights[i], 0, start)
            if biases:
                yield Piece(f"{parent}.{name}.bias", (size,), biases[i], 0, start)


class RowParallelLinear(Weighted):
    """A linear whose input features are split; the ranks' summands are added up.

    The bias is part of rank 0's summand, so that the `partial` outputs sum to the output exactly once.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.tp = (out_features, in_features), tp
        self.weight = _parameter(out_features, in_features // tp.size, dtype=dtype)
        self.bias = _parameter(out_features, dtype=dtype) if bias else None
        self.partial = Probe(PARTIAL)
        self.tap_dims = {"in[input]": SHARD, "out": WHOLE}

    def forward(self, input: Tensor) -> Tensor:
        """[tokens, in_features / tp] -> [tokens, out_features]."""
        bias = self.bias if self.tp.rank == 0 else None
        summand: Tensor = self.partial(functional.linear(input, self.weight, bias))
        return self.tp.all_reduce(summand)

    def pieces(self, path: str) -> Iterator[Piece]:
        """This rank's columns, and the whole bias."""
        yield Piece(f"{path}.weight", self.shape, self.weight, 1, self.tp.span(self.shape[1])[0])
        if self.bias is not None:
            yield Piece(f"{path}.bias", self.shape[:1], self.bias)


class VocabEmbedding(Weighted):
    """Token embedding with the vocabulary split over ranks; the last rank may hold fewer rows."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.tp = (vocab_size, hidden_size), tp
        self.start, self.end = tp.span(vocab_size)
        self.weight = _parameter(self.end - self.start, hidden_size, dtype=dtype)
        self.tap_dims = {"in[input]": TOKENS, "out": WHOLE}

    def forward(self, input: Tensor) -> Tensor:
        """Token ids [tokens] -> [tokens, hidden]; other ranks' tokens are zero rows here, then summed."""
        if self.tp.size == 1:
            return functional.embedding(input, self.weight)
        elsewhere = (input < self.start) | (input >= self.end)
        if self.start == self.end:  # more ranks than blocks of the vocabulary
            return self.tp.all_reduce(self.weight.new_zeros(len(input), self.shape[1]))
        local = functional.embedding((input - self.start).masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(local.masked_fill(elsewhere.unsqueeze(-1), 0))

    def pieces(self, path: str) -> Iterator[Piece]:
        """This rank's rows."""
        yield Piece(f"{path}.weight", self.shape, self.weight, 0, self.start)


class VocabHead(Weighted):
    """Logits over this rank's part of the vocabulary; may share its weight with a :class:`VocabEmbedding`."""

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: TensorParallel, dtype: torch.dtype, tied: VocabEmbedding | None
    ) -> None:
        super().__init__()
        self.shape, self.is_tied = (vocab_size, hidden_size), tied is not None
        self.start, end = tp.span(vocab_size)
        self.weight = tied.weight if tied is not None else _parameter(end - self.start, hidden_size, dtype=dtype)
        self.tap_dims = {"in[input]": WHOLE, "out": "t v[tp]"}
        self.tap_rows = {"in[input]": "logits", "out": "logits"}

    def forward(self, input: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, this rank's span of the vocabulary]."""
        return functional.linear(input, self.weight)

    def pieces(self, path: str) -> Iterator[Piece]:
        """This rank's rows, unless the embedding fills them."""
        if not self.is_tied:
            yield Piece(f"{path}.weight", self.shape, self.weight, 0, self.start)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary position embedding, arXiv:2104.09864, halves side by side as transformers does."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)
        self.tap_dims = {"in[hidden_states]": WHOLE, "in[position_ids]": TOKENS, "out[0]": ANGLES, "out[1]": ANGLES}

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [tokens] -> cos and sin [tokens, head_dim] in the dtype of ``hidden_states``."""
        angles = position_ids[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[head_dim / 2] float32: theta^(-2i/d), with Llama 3.1's stretching of long wavelengths when asked for.

    ``llama3`` is `apply_scaling` of Meta's reference code, as in transformers' `_compute_llama3_parameters`:
    wavelengths above original/low are divided by factor, below original/high kept, between them blended.
    """
    rope = config.rope
    freq = 1.0 / (rope.theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim))
    if rope.kind == "default":
        return freq
    turns = rope.original_max_positions * freq / (2 * torch.pi)  # rotations within the original context
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * freq / rope.factor + blend * freq


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
