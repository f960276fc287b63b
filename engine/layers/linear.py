"""Linear layers whose features are split over tensor-parallel ranks."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.engine.layers.probe import PARTIAL, SHARD, WHOLE, Probe
from tapscope.engine.parallel import TensorParallel
from tapscope.engine.weights import Piece, Weighted, parameter


class FusedLinear(Weighted):
    """Several column-parallel linears of one input as one GEMM; returns one view per part.

    ``parts`` maps each part's name, a sibling of this module in the checkpoint, to its output features.
    """

    may_quantize = True

    tap_ports = ("in",)
    """Its outputs are seen under their own names, as outputs of the parts' Probes."""

    def __init__(
        self, in_features: int, parts: dict[str, int], bias: bool, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features, self.parts, self.tp = in_features, parts, tp
        self.widths = [size // tp.size for size in parts.values()]
        self.weight = parameter(sum(self.widths), in_features, dtype=dtype)
        self.bias = parameter(sum(self.widths), dtype=dtype) if bias else None
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

    may_quantize = True

    def __init__(self, in_features: int, out_features: int, bias: bool, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.tp = (out_features, in_features), tp
        self.weight = parameter(out_features, in_features // tp.size, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None
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


class ColumnParallelLinear(Weighted):
    """A linear whose output features are split."""

    may_quantize = True

    def __init__(self, in_features: int, out_features: int, bias: bool, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.tp = (out_features, in_features), tp
        self.weight = parameter(out_features // tp.size, in_features, dtype=dtype)
        self.bias = parameter(out_features // tp.size, dtype=dtype) if bias else None
        self.tap_dims = {"in[input]": WHOLE, "out": SHARD}

    def forward(self, input: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features / tp]."""
        return functional.linear(input, self.weight, self.bias)

    def pieces(self, path: str) -> Iterator[Piece]:
        """This rank's rows."""
        start = self.tp.span(self.shape[0])[0]
        yield Piece(f"{path}.weight", self.shape, self.weight, 0, start)
        if self.bias is not None:
            yield Piece(f"{path}.bias", self.shape[:1], self.bias, 0, start)


class ReplicatedLinear(Weighted):
    """A linear that every rank computes whole."""

    may_quantize = True

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None
        self.tap_dims = {"in[input]": WHOLE, "out": WHOLE}

    def forward(self, input: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return functional.linear(input, self.weight, self.bias)

    def pieces(self, path: str) -> Iterator[Piece]:
        """The whole weight and bias."""
        yield Piece(f"{path}.weight", tuple(self.weight.shape), self.weight)
        if self.bias is not None:
            yield Piece(f"{path}.bias", tuple(self.bias.shape), self.bias)
