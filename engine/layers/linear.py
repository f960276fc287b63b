"""Tensor-parallel linear layers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.probe import PARTIAL, SHARD, WHOLE, Probe


class FusedLinear(CheckpointModule):
    """Several column-parallel linears of one input as one GEMM; returns one view per part.

    ``parts`` maps the name of each part, a sibling of this module in the checkpoint, to this rank's output features.
    """

    may_quantize = True

    tap_ports: tuple[str, ...] = ("in",)
    """Only the input is tapped; the outputs are outputs of the parts' Probes, under their own names."""

    def __init__(self, in_features: int, parts: dict[str, Shard], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.parts = in_features, parts
        self.widths = [share.count for share in parts.values()]
        self.weight = parameter(sum(self.widths), in_features, dtype=dtype)
        self.bias = parameter(sum(self.widths), dtype=dtype) if bias else None
        self.tap_dims = {"in[input]": WHOLE} | {f"out[{i}]": part.dims("h") for i, part in enumerate(parts.values())}

    def forward(self, input: Tensor) -> Any:
        """[tokens, in_features] -> one [tokens, this rank's features] view per part."""
        return torch.split(linear(input, self.weight, self.bias), self.widths, dim=-1)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """This rank's rows of each part, concatenated."""
        parent = path.rpartition(".")[0]
        weights = torch.split(self.weight, self.widths)
        biases = torch.split(self.bias, self.widths) if self.bias is not None else ()
        for i, (name, share) in enumerate(self.parts.items()):
            yield WeightSlice(f"{parent}.{name}.weight", (share.total, self.in_features), weights[i], 0, share.start)
            if biases:
                yield WeightSlice(f"{parent}.{name}.bias", (share.total,), biases[i], 0, share.start)


class PackedLinear(FusedLinear):
    """A FusedLinear that is one tensor in the checkpoint too, as in transformers' Phi-3; returns one tensor."""

    def __init__(self, in_features: int, parts: dict[str, Shard], bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, parts, bias, dtype)
        if all(part.count == part.total for part in parts.values()):  # the parts' shards cannot be one axis of dims
            self.tap_ports = ("in", "out")
        self.tap_dims = {"in[input]": WHOLE} | ({"out": WHOLE} if "out" in self.tap_ports else {})

    def forward(self, input: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, this rank's features of all parts]."""
        return linear(input, self.weight, self.bias)

    def split(self, output: Tensor) -> tuple[Tensor, ...]:
        """One view of ``output`` per part."""
        return torch.split(output, self.widths, dim=-1)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """This rank's rows of each part of the checkpoint's tensors."""
        total, offset = sum(part.total for part in self.parts.values()), 0
        weights = torch.split(self.weight, self.widths)
        biases = torch.split(self.bias, self.widths) if self.bias is not None else ()
        for i, part in enumerate(self.parts.values()):
            start = offset + part.start
            yield WeightSlice(f"{path}.weight", (total, self.in_features), weights[i], 0, start)
            if biases:
                yield WeightSlice(f"{path}.bias", (total,), biases[i], 0, start)
            offset += part.total


class RowParallelLinear(CheckpointModule):
    """A linear whose input features are split, followed by an all-reduce.

    Rank 0 adds the bias, so that the sum of the `partial` outputs contains it once.
    """

    may_quantize = True

    def __init__(self, inputs: Shard, out_features: int, bias: bool, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.inputs, self.tp = (out_features, inputs.total), inputs, tp
        self.weight = parameter(out_features, inputs.count, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None
        self.partial = Probe(PARTIAL)
        self.tap_dims = {"in[input]": SHARD, "out": WHOLE}

    def forward(self, input: Tensor) -> Tensor:
        """[tokens, this rank's inputs] -> [tokens, out_features]."""
        bias = self.bias if self.tp.rank == 0 else None
        summand: Tensor = self.partial(linear(input, self.weight, bias))
        return self.tp.all_reduce(summand)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """This rank's columns, and the whole bias."""
        yield WeightSlice(f"{path}.weight", self.shape, self.weight, 1, self.inputs.start)
        if self.bias is not None:
            yield WeightSlice(f"{path}.bias", self.shape[:1], self.bias)


class ColumnParallelLinear(CheckpointModule):
    """A linear whose output features are split."""

    may_quantize = True

    def __init__(self, in_features: int, outputs: Shard, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.outputs = (outputs.total, in_features), outputs
        self.weight = parameter(outputs.count, in_features, dtype=dtype)
        self.bias = parameter(outputs.count, dtype=dtype) if bias else None
        self.tap_dims = {"in[input]": WHOLE, "out": SHARD}

    def forward(self, input: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, this rank's outputs]."""
        return linear(input, self.weight, self.bias)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """This rank's rows."""
        start = self.outputs.start
        yield WeightSlice(f"{path}.weight", self.shape, self.weight, 0, start)
        if self.bias is not None:
            yield WeightSlice(f"{path}.bias", self.shape[:1], self.bias, 0, start)


class ReplicatedLinear(CheckpointModule):
    """A linear that is replicated on every rank."""

    may_quantize = True

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None
        self.tap_dims = {"in[input]": WHOLE, "out": WHOLE}

    def forward(self, input: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return linear(input, self.weight, self.bias)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """The whole weight and bias."""
        yield WeightSlice(f"{path}.weight", tuple(self.weight.shape), self.weight)
        if self.bias is not None:
            yield WeightSlice(f"{path}.bias", tuple(self.bias.shape), self.bias)
