"""Tensor-parallel linear layers."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tapscope.engine.checkpoint.quantization import ActivationScheme
from tapscope.engine.checkpoint.weight_loader import CheckpointModule, Scales, WeightSlice, linear_weight, parameter
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.probe import PARTIAL, SHARD, WHOLE, Probe, must_be_called
from tapscope.engine.layers.quantized import InputQuantizer, QuantizedWeight, ScaleLayout, quantized_linear

if TYPE_CHECKING:
    from tapscope.engine.layers.lora import LoraLayer


class Linear(CheckpointModule):
    """Base class of linear layers: a weight [outs, ins], which may stay quantized in memory, and an optional bias."""

    may_quantize = True
    may_stay_quantized = True
    """False for a weight that layers share, or that code other than :meth:`product` reads."""
    may_have_adapters = True
    """False for a weight that code other than :meth:`product` reads."""

    tap_dims: dict[str, str]
    tap_ports: tuple[str, ...] = ("in", "out")

    def __init__(self, outs: int, ins: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = linear_weight(outs, ins, dtype=dtype)
        self.bias = parameter(outs, dtype=dtype) if bias else None
        self.weight_scale: nn.Parameter | None = None
        """Scales of a quantized weight, [scale rows, groups]: float32, or for a 4-bit weight the checkpoint's dtype."""
        self.weight_zero: nn.Parameter | None = None
        """Zero points of a 4-bit weight, [scale rows, groups] uint8; None means 8."""
        self.scale_layout: ScaleLayout | None = None
        self.input_quantizer: InputQuantizer | None = None
        """Quantizes the input, if the checkpoint specifies quantized activations; its outputs are sites."""
        self.lora: LoraLayer | None = None
        """LoRA adapters of the layer; None in an engine without adapters."""

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Compute [tokens, ins] -> [tokens, outs], including the LoRA updates of adapted rows."""
        output = self._base_product(input, bias)
        return output if self.lora is None else self.lora.apply(input, output)

    @property
    def is_plain(self) -> bool:
        """Whether :meth:`product` needs only the weight and the bias: no LoRA adapters and no quantization."""
        return self.lora is None and self.scale_layout is None

    def _base_product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        if self.scale_layout is None or self.weight_scale is None:
            return linear(input, self.weight, bias, is_constant=True)
        scale, layout = self.weight_scale, self.scale_layout
        return quantized_linear(input, self.weight, scale, layout, bias, self.input_quantizer, self.weight_zero)

    def keep_quantized(self, kept: QuantizedWeight, device: torch.device) -> None:
        """Replace the weight with uninitialized codes and scales; 4-bit codes are [outs, ins / 2]."""
        self.weight, self.weight_scale, self.weight_zero = kept.allocate(self.weight.shape, device)
        self.scale_layout = kept.layout.to(device)

    def quantize_input(self, scheme: ActivationScheme, part_scales: Sequence[float]) -> None:
        """Quantize the input of a layer with a quantized weight; ``part_scales``: static scale of each part, if any."""
        self.input_quantizer = InputQuantizer(scheme, self.tap_dims["in[input]"]).to(self.weight.device)
        if scheme.is_static:
            self.input_quantizer.set_part_scales(part_scales)

    def scale_parts(self, count: int = 1) -> list[Scales | None]:
        """Return views of the scales of ``count`` parts of the weight; all None if the weight is not quantized."""
        if self.scale_layout is None or self.weight_scale is None:
            return [None] * count
        return self.scale_layout.scales_of(self.weight_scale, self.weight_zero)


def quantizer_of(module: nn.Module | None) -> InputQuantizer | None:
    """Return the input quantizer of ``module``: a Linear, or a module whose ``first_linear`` receives the same input.

    None if the layer has no quantizer, or if hooks other than taps may change the input before it.
    """
    linear = module if isinstance(module, Linear) else getattr(module, "first_linear", None)
    if module is None or not isinstance(linear, Linear) or linear.input_quantizer is None:
        return None
    return None if must_be_called(module) or must_be_called(linear) else linear.input_quantizer


class FusedLinear(Linear):
    """Several column-parallel linears of one input, computed as one GEMM; the output is one view per part.

    ``parts`` maps each part's name, a sibling of this module in the checkpoint, to this rank's output features.
    """

    tap_ports: tuple[str, ...] = ("in",)
    """Only the input is tapped here; the outputs are tapped at the parts' Probes, under the parts' names."""

    def __init__(self, in_features: int, parts: dict[str, Shard], bias: bool, dtype: torch.dtype) -> None:
        self.widths = [share.count for share in parts.values()]
        super().__init__(sum(self.widths), in_features, bias, dtype)
        self.in_features, self.parts = in_features, parts
        self.tap_dims = {"in[input]": WHOLE} | {f"out[{i}]": part.dims("h") for i, part in enumerate(parts.values())}

    def forward(self, input: Tensor) -> Any:
        """Compute [tokens, in_features] -> one view [tokens, this rank's features] per part."""
        return torch.split(self.product(input, self.bias), self.widths, dim=-1)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's rows of each part; the parts are concatenated in the weight."""
        parent = path.rpartition(".")[0]
        weights = torch.split(self.weight, self.widths)
        biases = torch.split(self.bias, self.widths) if self.bias is not None else ()
        scales = self.scale_parts(len(weights))
        for i, (name, share) in enumerate(self.parts.items()):
            shape = share.total, self.in_features
            yield WeightSlice(f"{parent}.{name}.weight", shape, weights[i], 0, share.start, scales=scales[i])
            if biases:
                yield WeightSlice(f"{parent}.{name}.bias", (share.total,), biases[i], 0, share.start)


class PackedLinear(FusedLinear):
    """FusedLinear whose parts are one tensor in the checkpoint too, as in transformers' Phi-3; returns one tensor."""

    def __init__(self, in_features: int, parts: dict[str, Shard], bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, parts, bias, dtype)
        if all(part.count == part.total for part in parts.values()):  # dims cannot express one axis of several shards
            self.tap_ports = ("in", "out")
        self.tap_dims = {"in[input]": WHOLE} | ({"out": WHOLE} if "out" in self.tap_ports else {})

    def forward(self, input: Tensor) -> Tensor:
        """Compute [tokens, in_features] -> [tokens, this rank's features of all parts]."""
        return self.product(input, self.bias)

    def split(self, output: Tensor) -> tuple[Tensor, ...]:
        """Split ``output`` into one view per part."""
        return torch.split(output, self.widths, dim=-1)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's rows of each part in the checkpoint's packed tensors."""
        total, offset = sum(part.total for part in self.parts.values()), 0
        weights = torch.split(self.weight, self.widths)
        biases = torch.split(self.bias, self.widths) if self.bias is not None else ()
        scales = self.scale_parts(len(weights))
        for i, part in enumerate(self.parts.values()):
            start = offset + part.start
            yield WeightSlice(f"{path}.weight", (total, self.in_features), weights[i], 0, start, scales=scales[i])
            if biases:
                yield WeightSlice(f"{path}.bias", (total,), biases[i], 0, start)
            offset += part.total


class RowParallelLinear(Linear):
    """Linear layer whose input features are split over ranks, followed by an all-reduce.

    Only rank 0 adds the bias, so that the sum of the `partial` outputs contains the bias once.
    """

    def __init__(self, inputs: Shard, out_features: int, bias: bool, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(out_features, inputs.count, bias, dtype)
        self.shape, self.inputs, self.tp = (out_features, inputs.total), inputs, tp
        self.partial = Probe(PARTIAL)
        self.tap_dims = {"in[input]": SHARD, "out": WHOLE}

    def forward(self, input: Tensor) -> Tensor:
        """Compute [tokens, this rank's inputs] -> [tokens, out_features], summed over ranks."""
        bias = self.bias if self.tp.rank == 0 else None
        summand: Tensor = self.partial(self.product(input, bias))
        return self.tp.all_reduce(summand)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's columns of the weight, and the whole bias."""
        start = self.inputs.start
        yield WeightSlice(f"{path}.weight", self.shape, self.weight, 1, start, scales=self.scale_parts()[0])
        if self.bias is not None:
            yield WeightSlice(f"{path}.bias", self.shape[:1], self.bias)


class ColumnParallelLinear(Linear):
    """Linear layer whose output features are split over ranks."""

    def __init__(self, in_features: int, outputs: Shard, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(outputs.count, in_features, bias, dtype)
        self.shape, self.outputs = (outputs.total, in_features), outputs
        self.tap_dims = {"in[input]": WHOLE, "out": SHARD}

    def forward(self, input: Tensor) -> Tensor:
        """Compute [tokens, in_features] -> [tokens, this rank's outputs]."""
        return self.product(input, self.bias)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's rows of the weight and the bias."""
        start = self.outputs.start
        yield WeightSlice(f"{path}.weight", self.shape, self.weight, 0, start, scales=self.scale_parts()[0])
        if self.bias is not None:
            yield WeightSlice(f"{path}.bias", self.shape[:1], self.bias, 0, start)


class ReplicatedLinear(Linear):
    """Linear layer that is replicated on every rank."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(out_features, in_features, bias, dtype)
        self.shape = (out_features, in_features)
        self.tap_dims = {"in[input]": WHOLE, "out": WHOLE}

    def forward(self, input: Tensor) -> Tensor:
        """Compute [tokens, in_features] -> [tokens, out_features]."""
        return self.product(input, self.bias)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the whole weight and bias."""
        yield WeightSlice(f"{path}.weight", self.shape, self.weight, scales=self.scale_parts()[0])
        if self.bias is not None:
            yield WeightSlice(f"{path}.bias", tuple(self.bias.shape), self.bias)
